"""torch's own tests of torch.distributed and DistributedDataParallel, over the backend syncbn.

torch.testing._internal.distributed.distributed_test is part of torch. These are its tests for Gloo on CPUs, and its
tests of all_to_all, which it runs for MPI only. NOT_APPLICABLE lists the exceptions.
"""

import ranks  # first: it skips the tests where there is no torch

import collections
import multiprocessing
import os
import sys
import time
import types
import unittest
from unittest import mock

# torch selects its tests by this name when it is imported.
os.environ.update(BACKEND="gloo", WORLD_SIZE="4", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")

try:
    import expecttest  # noqa: F401
except ImportError:
    ranks.report("skipped", "all", "needs: expecttest")
    sys.exit(ranks.EXIT_SKIPPED)

from torch.testing._internal import common_distributed

for_gpus = unittest.skip("for GPUs")
common_distributed.skip_if_no_gpu = for_gpus
common_distributed.skip_if_lt_x_gpu = lambda _, allow_cpu=False: (lambda test: test) if allow_cpu else for_gpus

from torch.testing._internal.distributed import distributed_test

import syncbn  # noqa: F401

# While these run: with a backend other than MPI, the tests of subgroups would need 8 ranks.
os.environ["BACKEND"] = "mpi"
distributed_test.BACKEND = "syncbn"
Tests = distributed_test.DistributedTest._DistTestBase
# They wait for their ranks with sleep(0.1).
quick_time = types.SimpleNamespace(**vars(time))
quick_time.sleep = lambda seconds: time.sleep(0.01 if seconds == 0.1 else seconds)
common_distributed.time = distributed_test.time = quick_time

NOT_APPLICABLE = {
    "test_barrier_timeout_arg": "expects Gloo's wording of a timeout",  # torch 2.12 and later
    "test_barrier_timeout_full_group": "expects Gloo's wording of a timeout",
    "test_barrier_timeout_group": "expects Gloo's wording of a timeout",
    "test_ddp_logging_data_cpu": "libtorch names each backend that is not its own 'custom'",
    "test_monitored_barrier_failure_order": "monitored_barrier() is Gloo's alone",
    "test_monitored_barrier_gloo": "monitored_barrier() is Gloo's alone",
    "test_monitored_barrier_gloo_rank_0_timeout": "monitored_barrier() is Gloo's alone",
    "test_monitored_barrier_gloo_subgroup": "monitored_barrier() is Gloo's alone",
    "test_monitored_barrier_wait_all_ranks": "monitored_barrier() is Gloo's alone",
    "test_send_recv_any_source": "recv() needs a source",
    "test_send_recv_any_source_autograd_profiler": "recv() needs a source",
    "test_send_recv_any_source_torch_profiler": "recv() needs a source",
}


class TorchTest(distributed_test.TestDistBackend, Tests):
    def setUp(self):
        super().setUp()
        # Forked, not spawned: importing torch takes longer than most tests.
        self._start_processes(multiprocessing.get_context("fork").Process)

    def _test_accumulate_gradients_no_sync(self, **options):
        with mock.patch.object(distributed_test, "BACKEND", "gloo"):  # makes the test run on CPUs
            super()._test_accumulate_gradients_no_sync(**options)


def why_not(name):
    """Why the test does not apply, or None."""
    return NOT_APPLICABLE.get(name) or getattr(getattr(TorchTest, name), "__unittest_skip_why__", None)


def load_tests(loader, *_):
    """Implements unittest's load_tests protocol."""
    names = loader.getTestCaseNames(TorchTest)
    for name in names:
        if (why_not(name) or "").startswith("Only MPI supports"):
            test = getattr(TorchTest, name)
            del test.__unittest_skip__, test.__unittest_skip_why__
    others = collections.Counter(why_not(name) for name in names)
    chosen = others.pop(None)
    print(f"{chosen} of {len(names)} tests apply; of the others,")
    for reason, count in others.most_common():
        print(f"{count:4} {reason}")
    return unittest.TestSuite(TorchTest(name) for name in names if why_not(name) is None)


if __name__ == "__main__":
    ranks.main(globals())
