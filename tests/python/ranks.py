"""Shared by the tests of the Python package. A file has both the tests and the functions that their ranks run.

A test calls run("function", 2), which starts the test's file once per rank; main() runs the function there.
"""

import inspect
import os
import pathlib
import signal
import socket
import subprocess
import sys
import unittest

BIN = pathlib.Path(os.environ.get("SYNCBN_BIN_DIR", "build/bin"))
SUITE = f"{os.environ.get('SYNCBN_TEST_PREFIX', '')}Python.{pathlib.Path(sys.argv[0]).stem.removesuffix('_test')}"
TIMEOUT_SECONDS = 240
EXIT_SKIPPED = 77
if not SUITE.endswith(".gpu"):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # as in tests/discover_suites.cmake: the same on a machine with GPUs

LAUNCHERS = {
    "syncbn-launch": [str(BIN / "syncbn-launch")],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
}


def report(outcome, test, reason=""):
    """Reports results like tests/support/test_main.cpp."""
    if path := os.environ.get("SYNCBN_TEST_REPORT"):
        with open(path, "a") as file:
            file.write(f"{outcome}\t{SUITE}.{test}\t{reason}\n")


try:
    import torch.distributed  # noqa: F401
except ImportError:
    report("skipped", "all", "needs: python-torch")
    sys.exit(EXIT_SKIPPED)


def start(command, **environment):
    return subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHON_EXEC": sys.executable, **environment})


def output_of(process):
    """Waits for the process. Returns its exit code and output."""
    try:
        output = process.communicate(timeout=TIMEOUT_SECONDS)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, output


def run(function, ranks, launcher="syncbn-launch", **environment):
    """Runs a function of the test's file on each rank. Returns exit code and output of the launcher."""
    script = inspect.stack()[1].filename
    return output_of(start([*LAUNCHERS[launcher], "--standalone", f"--nproc_per_node={ranks}", script,
                            "--rank", function], **environment))


held_ports = []


def free_port():
    """A port that the kernel assigns to no other process until this program ends; a store can still listen on it."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    held_ports.append(held)
    return str(held.getsockname()[1])


def run_without_launcher(function, ranks):
    """The output of each rank. There is no launcher that ends the others when one fails."""
    script = inspect.stack()[1].filename
    place = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    started = [start([sys.executable, script, "--rank", function], RANK=str(rank), **place)
               for rank in range(ranks)]
    return [output_of(one)[1] for one in started]


def run_on_two_hosts(function, ranks_per_host):
    """Like run(), on each of two hosts, which are PID namespaces: their processes cannot share memory."""
    script = inspect.stack()[1].filename
    port = free_port()
    started = [
        start(["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *LAUNCHERS["syncbn-launch"],
               "--nnodes=2", f"--node_rank={host}", "--master_addr=127.0.0.1", f"--master_port={port}",
               f"--nproc_per_node={ranks_per_host}", script, "--rank", function])
        for host in range(2)]
    return [output_of(one) for one in started]


class RanksTest(unittest.TestCase):
    def expect_success(self, done, line):
        """Checks that every rank succeeded, and that one printed the line."""
        exit_code, output = done
        self.assertEqual(exit_code, 0, output)
        self.assertIn(line, output)

    def need_namespaces(self):
        if os.geteuid() != 0:
            self.skipTest("namespaces")


class Result(unittest.TextTestResult):
    def addSuccess(self, test):
        super().addSuccess(test)
        report("passed", test._testMethodName)

    def addFailure(self, test, error):
        super().addFailure(test, error)
        report("failed", test._testMethodName)

    def addError(self, test, error):
        super().addError(test, error)
        report("failed", test._testMethodName)

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        report("skipped", test._testMethodName, f"needs: {reason}")


def main(names):
    if sys.argv[1:2] == ["--rank"]:
        names[sys.argv[2]]()
        return
    unittest.main(verbosity=2, testRunner=unittest.TextTestRunner(verbosity=2, resultclass=Result))
