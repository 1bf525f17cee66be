"""Shared by the tests of the Python package. A file has both the tests and the functions that their ranks run.

A test calls run(function, 2), which forks a process per rank: importing torch takes longer than most tests. Forked ranks
end without the interpreter's shutdown. Under a launcher, run() starts the function's file once per rank, and main() runs
the function there.
"""

import functools
import inspect
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import unittest

BIN = pathlib.Path(os.environ.get("SYNCBN_BIN_DIR", "build/bin"))
SUITE = os.environ.get("SYNCBN_TEST_SUITE", f"Python.{pathlib.Path(sys.argv[0]).stem.removesuffix('_test')}")
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
    import torch
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


class Rank:
    """A forked process that runs a function, and its output."""

    def __init__(self, function, environment):
        self.file = tempfile.TemporaryFile("w+")
        self.has_ended = False
        sys.stdout.flush()
        self.process = os.fork()
        if self.process == 0:
            self.run(function, environment)

    def run(self, function, environment):
        exit_code = 1
        try:
            os.setsid()
            os.dup2(self.file.fileno(), sys.stdout.fileno())
            os.dup2(self.file.fileno(), sys.stderr.fileno())
            os.environ.update(environment)
            torch.set_num_threads(1)
            torch.distributed.set_debug_level_from_env()
            function()
            exit_code = 0
        except SystemExit as error:
            exit_code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)

    def wait(self, until):
        """Returns exit code and output."""
        while not (ended := os.waitpid(self.process, os.WNOHANG))[0]:
            if time.monotonic() > until:
                raise TimeoutError(self.output())
            time.sleep(0.01)
        self.has_ended = True
        return os.waitstatus_to_exitcode(ended[1]), self.output()

    def kill(self):
        if not self.has_ended:
            os.killpg(self.process, signal.SIGKILL)
            os.waitpid(self.process, 0)

    def output(self):
        with self.file as file:
            file.seek(0)
            return file.read()


def run_each(function, ranks, **environment):
    """Exit code and output of each rank. There is no launcher that ends the others when one fails."""
    place = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    started = [Rank(function, {key: str(value) for key, value in
                               {**place, "RANK": rank, "LOCAL_RANK": rank, **environment}.items()})
               for rank in range(ranks)]
    until = time.monotonic() + TIMEOUT_SECONDS
    try:
        return [one.wait(until) for one in started]
    finally:
        for one in started:
            one.kill()


def run(function, ranks, launcher=None, **environment):
    """Runs a function of the test's file on each rank. Returns the first exit code other than 0, and all output."""
    if launcher is not None:
        return output_of(start([*LAUNCHERS[launcher], "--standalone", f"--nproc_per_node={ranks}",
                                inspect.getfile(inspect.unwrap(function)), "--rank", function.__name__], **environment))
    done = run_each(function, ranks, **environment)
    return next((code for code, _ in done if code != 0), 0), "".join(output for _, output in done)


held_ports = []


def free_port():
    """A port that the kernel assigns to no other process until this program ends; a store can still listen on it."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    held_ports.append(held)
    return str(held.getsockname()[1])


def run_on_two_hosts(function, ranks_per_host):
    """Like run() under syncbn-launch, on each of two hosts, which are PID namespaces: their processes cannot share
    memory."""
    port = free_port()
    started = [
        start(["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *LAUNCHERS["syncbn-launch"],
               "--nnodes=2", f"--node_rank={host}", "--master_addr=127.0.0.1", f"--master_port={port}",
               f"--nproc_per_node={ranks_per_host}", inspect.getfile(inspect.unwrap(function)),
               "--rank", function.__name__])
        for host in range(2)]
    return [output_of(one) for one in started]


def in_group(function):
    """Runs function(rank) in a default group of the backend syncbn, then destroys the group."""
    @functools.wraps(function)
    def run_in_group():
        import syncbn  # noqa: F401
        torch.distributed.init_process_group("syncbn")
        function(torch.distributed.get_rank())
        torch.distributed.destroy_process_group()
    return run_in_group


def tell_refusal(call, errors=RuntimeError):
    """Prints this rank's number and the error, or "not refused"."""
    try:
        call()
        print(f"rank {os.environ['RANK']}: not refused", flush=True)
    except errors as error:
        print(f"rank {os.environ['RANK']}: {error}", flush=True)


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
