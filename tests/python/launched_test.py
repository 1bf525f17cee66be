"""Tests that start new Python processes: each imports torch, which takes seconds."""

import ranks  # first: it skips the tests where there is no torch

import datetime
import os
import pathlib
import re
import shutil
import signal
import sys
import tempfile
import time
import unittest

import torch
import torch.distributed as dist

import ddp_test


# Rank 1 is refused, and rank 0 waits for it in vain.
def starts_again_after_a_failure():
    import syncbn  # noqa: F401
    is_first = os.environ["RANK"] == "0"
    wrong = dict(timeout=datetime.timedelta(seconds=2)) if is_first else dict(pg_options=object())
    ranks.tell_refusal(lambda: dist.init_process_group("syncbn", **wrong), (RuntimeError, ValueError))
    ddp_test.wait_for_rank_0("failed")
    ddp_test.starts_again()


def killed_rank_under_a_launcher():
    import syncbn  # noqa: F401
    dist.init_process_group("syncbn")
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    if dist.get_rank() == 1:
        while store.add("in the call", 0) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.all_reduce(torch.zeros(1000), async_op=True)
    store.add("in the call", 1)
    work.wait()


class LaunchedTest(ranks.RanksTest):
    def test_works_under_torchrun(self):
        self.expect_success(ranks.run(ddp_test.equals_gloo, 2, launcher="torchrun"), "equal 11")

    def test_a_default_group_after_one_failed(self):
        for launcher in ranks.LAUNCHERS:
            with tempfile.TemporaryDirectory() as folder:
                done = ranks.run(starts_again_after_a_failure, 2, launcher, EVENTS=folder)
            self.expect_success(done, "rank 0: rank 0 of 2 waited 2.0 s for rank 1, which did not arrive")
            self.expect_success(done, "attempt 1")

    def test_the_last_calls_outlive_the_ranks(self):
        exit_code, output = ranks.run(killed_rank_under_a_launcher, 3, "syncbn-launch")
        self.assertEqual(exit_code, 128 + signal.SIGKILL, output)
        self.assertRegex(output, r"rank +1 ")
        command = re.search(r"syncbn-launch (explain \S+)", output)
        self.assertTrue(command, output)
        code, explained = ranks.output_of(ranks.start([*ranks.LAUNCHERS["syncbn-launch"], *command[1].split()]))
        self.assertEqual(code, 0, explained)
        # Ranks 0 and 2 were in the call that rank 1 did not make.
        self.assertRegex(explained, r"#2 of group '0', all_reduce of Float \[1000\]:\n")
        self.assertRegex(explained, r"rank 1 \(.*has not come to it")


class ImportTest(unittest.TestCase):
    def test_is_installed_with_its_libraries(self):
        with tempfile.TemporaryDirectory() as folder:
            ranks.output_of(ranks.start(["cmake", "--install", str(ranks.BIN.parent), "--component", "python",
                                         "--prefix", folder]))
            _, output = ranks.output_of(ranks.start(
                [sys.executable, "-c", "import syncbn; print(open('/proc/self/maps').read())"], PYTHONPATH=folder))
            self.assertIn(folder + "/syncbn/libsyncbn_dist.so", output)

    def test_refuses_another_torch_than_it_was_built_for(self):
        import syncbn
        with tempfile.TemporaryDirectory() as folder:
            package = pathlib.Path(folder, "syncbn")
            shutil.copytree(pathlib.Path(syncbn.__file__).parent, package)
            (package / "_built.py").write_text('VERSION = "0.1.0"\nTORCH = "2.99"\n')
            _, output = ranks.output_of(ranks.start([sys.executable, "-c", "import syncbn"], PYTHONPATH=folder))
        self.assertIn("ImportError: syncbn 0.1.0 was built for torch 2.99, and this is torch " + torch.__version__,
                      output)


if __name__ == "__main__":
    ranks.main(globals())
