#!/usr/bin/env python3
"""Checks the manifests of examples/kubernetes against the published schemas, and runs their containers' commands.

  tests/examples/kubernetes_test.py BUILD_FOLDER [unittest's arguments]

There is no cluster: each pod is a process here, with the environment and names that Kubernetes or Kubeflow would set.
"""

import gzip
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # as in tests/discover_suites.cmake: the same on a machine with GPUs
PYTHON = os.environ.get("SYNCBN_TEST_PYTHON")
if PYTHON and PYTHON != sys.executable:
    os.execv(PYTHON, [PYTHON, *sys.argv])


def report_skip(name, need):
    """Reports a skipped test to scripts/run-tests, like tests/support/test_main.cpp."""
    if report := os.environ.get("SYNCBN_TEST_REPORT"):
        with open(report, "a") as file:
            file.write(f"skipped\tExamples.Kubernetes.{name}\tneeds: {need}\n")


try:
    import jsonschema
    import yaml
except ImportError:
    report_skip("Manifests", "python-torch")
    sys.exit(77)

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
BUILD = pathlib.Path(sys.argv.pop(1)).resolve()
SCHEMA = json.load(gzip.open(pathlib.Path(__file__).with_name("kubernetes.schema.json.gz")))
TIMEOUT = 300


def documents(name):
    return list(yaml.safe_load_all((ROOT / "examples/kubernetes" / name).read_text()))


def problems(document):
    schema = {"$ref": "#/$defs/" + SCHEMA["kinds"][document["kind"]], "$defs": SCHEMA["$defs"]}
    return [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(document)]


HELD = []


def free_port():
    """A port that no other program gets while this one runs, except listeners with SO_REUSEADDR."""
    HELD.append(socket.socket())
    HELD[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    HELD[-1].bind(("127.0.0.1", 0))
    return HELD[-1].getsockname()[1]


class Schemas(unittest.TestCase):

    def test_manifests_fit(self):
        for name in os.listdir(ROOT / "examples/kubernetes"):
            for document in documents(name):
                self.assertEqual(problems(document), [], name)

    def test_misspelt_keys_do_not(self):
        _, job = documents("indexed_job.yaml")
        job["spec"]["podFailurePolicy"]["rules"][0]["onExitCode"] = {}
        self.assertIn("onExitCode", " ".join(problems(job)))
        (job,) = documents("pytorchjob.yaml")
        job["spec"]["elasticPolicy"]["minReplicas"] = "1"
        self.assertIn("'1' is not of type 'integer'", problems(job))


class Pods(unittest.TestCase):
    """Starts one worker per pod: two would be too many for the machines that run tests."""

    @classmethod
    def setUpClass(cls):
        if subprocess.run(["unshare", "--map-root-user", "--mount", "true"], capture_output=True).returncode != 0:
            report_skip(cls.__name__, "namespaces")
            raise unittest.SkipTest("needs: namespaces")

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.pods = []
        self.addCleanup(self.kill_all)

    def kill_all(self):
        for pod in self.pods:
            if pod.poll() is None:
                pod.kill()
            pod.wait()

    def start(self, container, host, environment, epochs):
        """`host` is the name by which all pods find the first one."""
        command = [word.replace("/runs/", f"{self.folder}/") for word in container["command"]]
        command[command.index("--nproc_per_node=auto")] = "--nproc_per_node=1"
        command = [str(BUILD / "bin/syncbn-launch"), *command[1:], f"epochs={epochs}", "model.width=4", "data.test_fraction=0.6"]
        hosts = self.folder / "hosts"
        hosts.write_text(f"127.0.0.1 localhost {host}\n")
        output = open(self.folder / f"pod-{len(self.pods)}.log", "w")
        self.pods.append(subprocess.Popen(
            ["unshare", "--map-root-user", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', hosts, *command],
            cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"} | environment, stdout=output, stderr=subprocess.STDOUT))
        output.close()
        return self.pods[-1]

    def log(self, pod):
        return (self.folder / f"pod-{self.pods.index(pod)}.log").read_text()

    def all_logs(self):
        return "\n".join(self.log(pod) for pod in self.pods)

    def wait_for(self, pod, pattern):
        end = time.monotonic() + TIMEOUT
        while not re.search(pattern, self.log(pod)):
            self.assertLess(time.monotonic(), end, f"no {pattern} in:\n{self.all_logs()}")
            self.assertIsNone(pod.poll(), self.all_logs())
            time.sleep(0.02)

    def exit_codes(self):
        return [pod.wait(TIMEOUT) for pod in self.pods]


class IndexedJob(Pods):

    def start_all(self, epochs):
        service, job = documents("indexed_job.yaml")
        pod = job["spec"]["template"]["spec"]
        self.assertEqual(service["metadata"]["name"], pod["subdomain"])
        self.assertEqual(service["spec"]["selector"], {"job-name": job["metadata"]["name"]})
        port = str(free_port())
        self.pods = []
        for index in range(job["spec"]["completions"]):
            self.start(pod["containers"][0], f"{job['metadata']['name']}-0.{pod['subdomain']}",
                       {"JOB_COMPLETION_INDEX": str(index), "PET_MASTER_PORT": port}, epochs)

    def test_its_pods_are_one_run(self):
        self.start_all(epochs=1)
        self.assertEqual(self.exit_codes(), [0, 0], self.all_logs())
        self.assertIn("2 ranks x batch 8", self.log(self.pods[0]))

    def test_a_drained_pod_ends_all_with_codes_that_are_not_counted_and_they_go_on(self):
        _, job = documents("indexed_job.yaml")
        ignored = [code for rule in job["spec"]["podFailurePolicy"]["rules"]
                   if rule["action"] == "Ignore" and "onExitCodes" in rule for code in rule["onExitCodes"]["values"]]
        self.start_all(epochs=12)
        self.wait_for(self.pods[0], "epoch +1/12")
        self.pods[1].send_signal(signal.SIGTERM)  # what kubelet sends
        for code in self.exit_codes():
            self.assertIn(code, ignored, self.all_logs())
        self.start_all(epochs=12)
        self.assertEqual(self.exit_codes(), [0, 0], self.all_logs())
        log = [json.loads(line) for line in (self.folder / "digits/log.jsonl").read_text().splitlines()]
        self.assertEqual([line["resumed"] for line in log if line["event"] == "start"], [False, True])

    def test_a_mistake_in_the_configuration_fails_the_job(self):
        _, job = documents("indexed_job.yaml")
        (fatal,) = [rule for rule in job["spec"]["podFailurePolicy"]["rules"] if rule["action"] == "FailJob"]
        self.start_all(epochs=-1)
        for code in self.exit_codes():
            self.assertIn(code, fatal["onExitCodes"]["values"], self.all_logs())


class PyTorchJob(Pods):

    def start_worker(self, epochs):
        (job,) = documents("pytorchjob.yaml")
        policy = job["spec"]["elasticPolicy"]
        (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
        host = f"{job['metadata']['name']}-worker-0"
        # The variables that Kubeflow's training operator sets. Only the port differs: it would be 23456.
        return self.start(container, host, {
            "PET_RDZV_BACKEND": policy["rdzvBackend"], "PET_RDZV_ENDPOINT": f"{host}:{self.port}",
            "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
            "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
            "PET_RDZV_CONF": "last_call_timeout=1"}, epochs)  # by default, a job with a range waits 30 s for more pods

    def wait_until_it_listens(self, pod):
        end = time.monotonic() + TIMEOUT
        while True:
            try:
                return socket.create_connection(("127.0.0.1", self.port)).close()
            except ConnectionRefusedError:
                self.assertLess(time.monotonic(), end, self.all_logs())
                self.assertIsNone(pod.poll(), self.all_logs())
                time.sleep(0.02)

    def test_pods_may_join_and_leave(self):
        self.port = free_port()
        first = self.start_worker(epochs=30)
        self.wait_until_it_listens(first)  # unlike in a cluster, another pod could take the first one's address
        second = self.start_worker(epochs=30)
        self.wait_for(first, "2 ranks x batch 8[^$]*epoch +[0-9]")
        third = self.start_worker(epochs=30)  # a larger `replicas`
        self.wait_for(first, "3 ranks x batch 8[^$]*epoch +[0-9]")
        third.send_signal(signal.SIGTERM)  # a smaller one
        self.wait_for(first, "3 ranks x batch 8[^$]*2 ranks x batch 8[^$]*epoch +[0-9]")
        self.assertEqual([first.wait(TIMEOUT), second.wait(TIMEOUT)], [0, 0], self.all_logs())


if __name__ == "__main__":
    unittest.main()
