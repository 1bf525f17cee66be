"""Tests of the decisions of scripts/, without the machines that these are about."""

import builtins
import dis
import importlib.machinery
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import unittest.mock

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "scripts"))


def load(name, folder="scripts"):
    """Loads a script as a module."""
    loader = importlib.machinery.SourceFileLoader(name.replace("-", "_"), str(ROOT / folder / name))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


gpu_check = load("gpu-check")
run_tests = load("run-tests")
bench_gpu = load("run.py", "bench/gpu")

MACHINE = {"gpu": "NVIDIA H200", "gpus": 1, "driver": "580.1", "memory": "141 GB", "torch": "2.11.0", "cuda": "13.1",
           "nccl": "2.28.9", "cudnn": "91002", "cores": 16, "commit": "1234567", "sources": "abcdef"}


class FaultTest(unittest.TestCase):
    def test_knows_every_name_that_a_case_uses(self):
        # Most cases are not run by `make test`. A name that does not exist would end the whole suite.
        fault_test = load("fault-test")
        unknown = [f"{name} in {code.co_name}, {code.co_filename}"
                   for module in [fault_test, *(sys.modules[name] for name in (
                       "cable", "hostile_cases", "job", "launcher_cases", "network_cases", "soak", "training_cases"))]
                   for code in codes_of(compile(pathlib.Path(module.__file__).read_text(), module.__file__, "exec"))
                   for name in global_names(code) if not hasattr(module, name) and not hasattr(builtins, name)]
        self.assertEqual(unknown, [])


def codes_of(code):
    """The code and all that is defined in it."""
    return [code, *(inner for one in code.co_consts if hasattr(one, "co_code") for inner in codes_of(one))]


def global_names(code):
    return {one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"}


class BenchOfAGpu(unittest.TestCase):
    def test_takes_a_smaller_batch_where_both_sides_do_not_fit(self):
        for gigabytes, step, layers in [(80, 256, 256), (24, 64, 128), (8, 16, 32), (1, 1, 1)]:
            self.assertEqual(bench_gpu.fitting(256, "step", gigabytes * 1e9), step)
            self.assertEqual(bench_gpu.fitting(256, "layers", gigabytes * 1e9), layers)
            self.assertIn(bench_gpu.counts_of(step)[0], range(1, 21))

    def test_a_row_of_a_smaller_batch_says_so_and_has_no_target(self):
        for gigabytes, name, target in [(24, "batch 64 (256 may not fit into 24 GB)", None), (80, "batch 256", 1)]:
            job = unittest.mock.Mock()
            job.ask.return_value = {"free": gigabytes * 1e9, "seconds": 1.0, "launches": 1, "copies": 0, "waits": 0}
            with unittest.mock.patch.multiple(bench_gpu, ours=lambda _: job, theirs=lambda _: job):
                arguments = unittest.mock.Mock(tiny=False, pairs=1)
                row = bench_gpu.step(256, arguments)["rows"][0]
            self.assertTrue(row["name"].startswith(f"ResNet-50 step, {name}, SyncBatchNorm"), row["name"])
            self.assertEqual(row["target"], target)


class GpuCheckReports(unittest.TestCase):
    """Test reports in the format of tests/support/test_main.cpp."""

    def figures(self, lines, gpus, pretend=False):
        with tempfile.TemporaryDirectory() as folder:
            report = pathlib.Path(folder, "report")
            report.write_text("".join("\t".join(line) + "\n" for line in lines))
            return gpu_check.read_report(report, gpus, pretend)

    def test_counts_what_ran_and_what_was_skipped_for_which_reason(self):
        figures = self.figures([("passed", "GpuTest.A", ""), ("passed", "Gpus/GpuTrainingTest.B/0", ""),
                                ("skipped", "GpuTest.C", "needs: two-gpus"),
                                ("skipped", "GpuTest.D", "needs: two-gpus")], gpus=1)
        self.assertEqual(figures, {"run": 2, "failed": [], "skipped": {"two-gpus": 2}})

    def test_a_need_excuses_only_where_the_machine_lacks_it(self):
        excused = {1: {"two-gpus", "eight-gpus", "fake-cuda"}, 2: {"eight-gpus", "fake-cuda"},
                   8: {"fake-cuda"}}
        for gpus, needs in excused.items():
            for need in ("two-gpus", "eight-gpus", "fake-cuda", "gpu", "python-torch"):
                with self.subTest(gpus=gpus, need=need):
                    figures = self.figures([("passed", "GpuTest.A", ""), ("skipped", "GpuTest.B", f"needs: {need}")],
                                           gpus)
                    expected = None if need in needs else f"skipped, though this machine has it: {need}"
                    self.assertEqual(figures.get("failure"), expected)

    def test_nothing_excuses_a_skip_on_fake_cuda_devices_there(self):
        figures = self.figures([("skipped", "GpuTest.A", "needs: fake-cuda")], gpus=2, pretend=True)
        self.assertIn("fake-cuda", figures["failure"])

    def test_a_failure_comes_before_a_skip(self):
        figures = self.figures([("failed", "GpuTest.A", "timed out"), ("skipped", "GpuTest.B", "needs: gpu")], gpus=1)
        self.assertEqual((figures["failed"], figures["failure"]), (["GpuTest.A"], "1 failed"))

    def test_a_missing_report_is_a_failure(self):
        figures = gpu_check.read_report(pathlib.Path("/nonexistent/report"), 1, False)
        self.assertIn("no test has written", figures["failure"])


class GpuCheckParts(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.check = object.__new__(gpu_check.Check)  # __init__ inspects the machine
        self.check.__dict__.update(parts={}, tried=set(), pretend=False, machine={"gpus": 1}, environment={},
                                   work=pathlib.Path(folder.name), record=self.record)

    def record(self, part, result):
        self.check.parts[part.name] = result

    def run_part(self, *arguments, seconds=60.0, **options):
        part = gpu_check.Part(*arguments, **options)
        self.check.run(part, time.monotonic() + seconds)
        return self.check.parts[part.name]

    def test_the_parts_for_several_gpus_run_where_there_are_several(self):
        several = {"bench/sync-cost", "bench/scaling"}
        self.check.__dict__.update(build=pathlib.Path("build"), python="python3", preload={})
        for gpus in (1, 2, 8):
            self.check.machine = {"gpus": gpus}
            parts = {part.name: part.command for part in self.check.bench_parts()}
            self.assertEqual(several & set(parts), several if gpus > 1 else set())
            self.assertTrue(all(command[-2:] == ["--gpus", str(gpus)] for command in parts.values()))
            page = gpu_check.gpu_check_page.not_run({"machine": {"gpus": gpus}, "stages": [], "parts": {}})
            self.assertEqual("sync-cost" in page, gpus < 2)
            self.assertEqual("targets of those parts" in page, gpus < 8)

    def test_the_page_judges_rows_for_several_gpus_by_their_target(self):
        row = {"name": "scaling", "ratio": 0.9, "interval": [0.8, 0.97], "target": 0.95, "at_least": True,
               "milliseconds": [1.0, 1.1]}
        parts = {"bench/scaling": {"status": "ok", "data": {"several": [row, {**row, "target": None}]}}}
        page = gpu_check.gpu_check_page.several({"fake": False, "parts": parts})
        self.assertEqual((page.count("missed"), page.count("no target")), (1, 1))

    def test_a_report_of_a_suite_with_parameters_lies_in_a_folder_that_exists(self):
        report = pathlib.Path(self.check.suite("All/GpuFaultTest", []).environment["SYNCBN_TEST_REPORT"])
        self.assertEqual(report.parent, self.check.work)

    def test_what_waits_for_a_failed_part_does_not_ask_for_another_call(self):
        self.assertEqual(self.run_part("build/tests", ["false"])["status"], "failed")
        waiting = self.run_part("tests/A", ["true"], needs=["build/tests"])
        self.assertEqual((waiting["status"], waiting["blocked"]), ("unfinished", True))
        self.assertTrue(self.run_part("tests/B", ["true"], needs=["tests/A"])["blocked"])
        self.assertNotIn("blocked", self.run_part("tests/C", ["true"], needs=["build/library"]))

    def test_a_build_that_failed_is_tried_once_in_each_call(self):
        self.run_part("build/configure", ["false"])
        self.assertEqual(self.run_part("build/configure", ["true"])["status"], "failed")
        self.check.tried.clear()
        self.assertEqual(self.run_part("build/configure", ["true"])["status"], "ok")

    def test_what_is_cut_off_goes_on_in_the_next_call_and_what_is_done_does_not_run_again(self):
        cut = self.run_part("build/tests", ["sleep", "60"], seconds=1.2)
        self.assertEqual((cut["status"], cut["note"]), ("unfinished", "cut off after 1 s"))
        late = self.run_part("train/A", ["true"], seconds=50)
        self.assertEqual((late["status"], late["note"]), ("unfinished", "the stage's time was over"))
        self.check.tried.clear()
        for name in ("build/tests", "train/A"):
            for command in ("true", "false"):
                self.assertEqual(self.run_part(name, [command], seconds=100)["status"], "ok")

    def test_a_call_asks_for_another_until_all_is_done_and_keeps_what_is_for_the_same_sources(self):
        self.check.__dict__.update(machine=MACHINE, out=self.check.work, state_file=self.check.work / "state.json",
                                   key="sources on GPU", lock=threading.Lock())
        for statuses, code in [(["ok", "unfinished"], 2), (["ok", "failed", "unfinished"], 2), (["ok", "failed"], 1),
                               (["ok", "ok"], 0)]:
            self.check.parts = {f"train/{i}": {"status": status} for i, status in enumerate(statuses)}
            self.assertEqual(self.check.finish(), code)
            self.assertEqual(json.loads((self.check.out / "gpu-check.json").read_text())["parts"], self.check.parts)
            self.assertEqual(self.check.saved_parts(), self.check.parts)
        self.check.key = "other sources on GPU"
        self.assertEqual(self.check.saved_parts(), {})

    def test_the_end_of_a_part_is_that_of_its_process_groups(self):
        # Like a test of tests/support/test_main.cpp, which puts its processes into their own group.
        process = subprocess.Popen(["bash", "-c", "set -m; sleep 1000 & echo $!; wait"], stdout=subprocess.PIPE,
                                   text=True, start_new_session=True)
        self.addCleanup(process.stdout.close)
        sleeper = pathlib.Path("/proc", process.stdout.readline().strip(), "stat")
        gpu_check.end(process)
        # It dies soon after the signal, and the process that inherits it may not reap it at once.
        until = time.monotonic() + 10
        while sleeper.exists() and sleeper.read_text().rpartition(")")[2].split()[0] != "Z":
            self.assertLess(time.monotonic(), until)
            time.sleep(0.01)


class GpuCheckPage(unittest.TestCase):
    def test_says_what_ran_what_did_not_and_why(self):
        row = {"name": "a step / Python's", "ratio": 1.125, "interval": [1.0625, 1.25], "target": 1.05,
               "at_least": True, "milliseconds": [8.0, 9.0]}
        parts = {
            "build/tests": {"status": "ok", "seconds": 12.0},
            "tests/A": {"status": "failed", "note": "1 failed", "log": ["what it printed"],
                        "data": {"run": 7, "failed": ["GpuTest.A"], "skipped": {"two-gpus": 3}}},
            "bench/step": {"status": "ok", "data": {"rows": [row], "traces": [
                {"name": "a layer", "launches": 4, "copies": 0, "waits": 0}]}},
            "train/digits": {"status": "unfinished", "note": "the stage's time was over"}}
        page = gpu_check.gpu_check_page.page({"machine": MACHINE, "fake": False, "stages": gpu_check.STAGES,
                                              "parts": parts})
        text = " ".join(re.sub("<style>.*</style>|<[^>]*>", " ", page, flags=re.DOTALL).split())
        for said in ("1 &times; NVIDIA H200, 141 GB driver 580.1 torch's CUDA 13.1 "
                     "NCCL, cuDNN 2.28.9, 91002 torch 2.11.0", "tests failed 1 failed 0.0", "7 run, 1 failed, 3 skipped. GpuTest.A failed "
                     "3 tests skipped: two-gpus", "1.125 1.062 &ndash; 1.250 at least 1.05 met",
                     "kernels launched copies and fills waits of the host a layer 4.0 0.0 0.0",
                     "What has not run why train/digits the stage&#x27;s time was over "
                     "exchanges over NCCL", "what it printed"):
            self.assertIn(said, text)


class RunTests(unittest.TestCase):
    def test_tells_the_time_of_the_fake_cuda_devices_and_warns_if_it_is_long(self):
        self.assertEqual(run_tests.time_of_fakegpu([100.4, 500], 3),
                         "warning: fakegpu: 2 entries, 600 s, about 500 s with 3 at once; CI needs them within 240 s")
        self.assertEqual(run_tests.time_of_fakegpu([240.0] * 3, 3),
                         "fakegpu: 3 entries, 720 s, about 240 s with 3 at once")

    def runs(self, *options, **environment):
        """The output for a ctest with one entry per label, one of which has a test that needs a GPU."""
        with tempfile.TemporaryDirectory() as folder:
            ctest = pathlib.Path(folder, "ctest")
            ctest.write_text("""#!/bin/sh
case "$*" in *--show-only*)
  label() { printf '{"name": "%s", "properties": [{"name": "LABELS", "value": ["%s"]}]}' $1 $2; }
  echo "{\\"tests\\": [$(label FakeGpu.GpuTest fakegpu), $(label Large exhaustive), $(label Ranks multiproc)]}"
  exit
esac
while [ "$1" != --output-junit ]; do shift; done
printf 'passed\tRanks.Add\t\nskipped\tRanks.Gpu\tneeds: gpu\n' >"$SYNCBN_TEST_REPORT"
echo '<testsuite><testcase name="FakeGpu.GpuTest" time="11.5" status="run"/>
<testcase name="Ranks" time="1" status="run"/></testsuite>' >"$2"
""")
            ctest.chmod(0o755)
            return subprocess.run(
                [sys.executable, ROOT / "scripts/run-tests", "release", *options], text=True, stdout=subprocess.PIPE,
                env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SYNCBN_TEST_PYTHON": "false",
                     "CI": "false", **environment})

    def test_tells_what_ran_what_was_left_out_and_why(self):
        done = self.runs("--require", "multiproc")
        self.assertEqual(done.returncode, 0, done.stdout)
        for line in ("Left to scripts/check-all: Large\n", "     1  gpu: a machine with an NVIDIA GPU\n",
                     "fakegpu: 1 entries, 12 s, about 12 s with ", "2 passed, 0 failed, 1 skipped\n"):
            self.assertIn(line, done.stdout)

    def test_fails_if_a_label_did_not_run_or_a_skip_is_not_allowed(self):
        done = self.runs("--require", "mpi")
        self.assertEqual(done.returncode, 1)
        self.assertIn("error: no test with the label mpi ran\n", done.stdout)
        self.assertEqual(self.runs(CI="true", SYNCBN_ALLOW_SKIP="gpu").returncode, 0)
        self.assertEqual(self.runs(CI="true", SYNCBN_ALLOW_SKIP="mpi").returncode, 1)


class Demo(unittest.TestCase):
    def says(self, call, **environment):
        command = ["bash", "-c", f'. "$1"; {call}', "bash", str(ROOT / "scripts/demo")]
        return subprocess.run(command, check=True, text=True, capture_output=True,
                              env={**os.environ, **environment}).stdout.strip()

    def test_ranks_are_as_many_as_two_or_three_gpus_else_four(self):
        ranks = self.says("for gpus in 0 1 2 3 4 8; do ranks_for $gpus; done").split()
        self.assertEqual(ranks, ["4", "4", "2", "3", "4", "4"])

    def test_counts_the_gpus_that_a_program_for_them_sees(self):
        with tempfile.TemporaryDirectory() as folder:
            bin = pathlib.Path(folder, "bin")
            bin.mkdir()
            self.assertEqual(self.says(f"count_gpus {bin}", CUDA_VISIBLE_DEVICES="0,1"), "0")
            library = pathlib.Path(folder, "lib/libsyncbn_dist_cuda.so")
            library.parent.mkdir()
            library.touch()
            for visible, count in (("", "0"), ("1", "1"), ("0,GPU-1234,3", "3"), ("-1", "0"), ("0,-1,1", "1")):
                self.assertEqual(self.says(f"count_gpus {bin}", CUDA_VISIBLE_DEVICES=visible), count)
            smi = bin / "nvidia-smi"
            smi.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100 (UUID: GPU-1)'\necho '  MIG 1g.5gb'\n"
                           "echo 'GPU 1: NVIDIA H100 (UUID: GPU-2)'\n")
            smi.chmod(0o755)
            unset = f"unset CUDA_VISIBLE_DEVICES; PATH={bin}:$PATH; count_gpus {bin}"
            self.assertEqual(self.says(unset), "2")
            smi.write_text("#!/bin/sh\nexit 9\n")
            self.assertEqual(self.says(unset), "0")


class Setup(unittest.TestCase):
    """scripts/setup in a folder that has nothing yet."""

    def says(self, *before, **more):
        environment = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
        environment |= {"PIP_FIND_LINKS": "", "Torch_ROOT": "", "CMAKE_PREFIX_PATH": "",
                        "PATH": "/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin", **more}
        with tempfile.TemporaryDirectory() as folder:
            scripts = pathlib.Path(folder, "scripts")
            scripts.mkdir()
            (scripts / "setup").write_bytes((ROOT / "scripts/setup").read_bytes())
            done = subprocess.run([*before, "bash", str(scripts / "setup")], text=True, capture_output=True,
                                  env=environment)
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        return done.stderr.strip()

    def test_says_once_what_cannot_be_installed_from_where_without_a_network(self):
        alone = ["unshare", "--user", "--map-root-user", "--net"]
        if subprocess.run([*alone, "true"], capture_output=True).returncode != 0:
            if path := os.environ.get("SYNCBN_TEST_REPORT"):  # as tests/support/test_main.cpp
                with open(path, "a") as file:
                    file.write("skipped\tScripts.DecideForOtherMachines.Setup\tneeds: namespaces\n")
            self.skipTest("namespaces")
        self.assertRegex(self.says(*alone), r"\Asetup: cannot install .+ from https?://\S+: .+\. Check the network.*\Z")

    def test_says_how_much_space_it_needs_before_it_downloads(self):
        with tempfile.TemporaryDirectory() as folder:
            df = pathlib.Path(folder, "df")
            df.write_text("#!/bin/sh\necho Avail\necho 1500\n")
            df.chmod(0o755)
            said = self.says(PATH=f"{folder}:/usr/sbin:/sbin:/usr/bin:/bin", PIP_PROXY="http://127.0.0.1:9")
        self.assertRegex(said, r"\Asetup: torch \S+ needs [26] GiB, and .venv has 1 GiB left on its disk; .*\Z")


if __name__ == "__main__":
    unittest.main()
