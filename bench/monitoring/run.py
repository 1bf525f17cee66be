#!/usr/bin/env python3
"""Measures the cost of monitoring a job, and of authentication between its launchers.

1. Steps of digits on two ranks, with heartbeats and flight record and without, by turns: images per second of the
   fastest epoch but the first. The workers without them do not get the launcher's descriptors.
2. The processor time of a launcher with 64 workers that report a step each second.
3. The processor time of both launchers of a job on two nodes with a token, less that without, by turns.
"""

import json
import os
import pathlib
import resource
import socket
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from pairs import ROOT, median_and_interval, parse_arguments

UNWATCHED = "unset SYNCBN_FLIGHT_FD SYNCBN_AGENT_FD;"
RANKS = 64
SECONDS = 20


def images_per_second(build, prepare, epochs):
    """Images per second of the fastest epoch, without the first."""
    with tempfile.TemporaryDirectory() as folder:
        train = f"{prepare} exec {build}/bin/train --config {ROOT}/configs/digits.yaml --epochs {epochs} --run_dir {folder}/run"
        launcher = [build / "bin/syncbn-launch", "--standalone", "--nproc_per_node=2", "sh", "-c", train]
        subprocess.run(launcher, check=True, capture_output=True, timeout=600)
        records = [json.loads(line) for line in (pathlib.Path(folder) / "run/log.jsonl").read_text().splitlines()]
    return max(record["images_per_second"] for record in records if record.get("event") == "epoch" and record["epoch"] > 1)


def launcher_share(build):
    """Processor time of a launcher with RANKS workers, in percent of a core."""
    worker = [build / "tests/launch_agent_worker", "steps", "1000", "1000"]
    job = subprocess.Popen([build / "bin/syncbn-launch", f"--nproc_per_node={RANKS}", *worker], stderr=subprocess.DEVNULL)
    times = []
    for wait in (5, SECONDS):
        time.sleep(wait)
        fields = pathlib.Path(f"/proc/{job.pid}/stat").read_text().rsplit(")", 1)[1].split()
        times.append((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
    job.terminate()
    job.wait()
    return 100 * (times[1] - times[0]) / SECONDS


def start_milliseconds(build, token):
    """Processor time of both launchers of a job on two nodes, from start to end."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        options = ["--nnodes=2", "--master_addr=127.0.0.1", f"--master_port={held.getsockname()[1]}", "true"]
        environment = {**os.environ, **({"SYNCBN_TOKEN": "0123456789abcdef" * 4} if token else {})}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        jobs = [subprocess.Popen([build / "bin/syncbn-launch", f"--node_rank={node}", *options], env=environment)
                for node in range(2)]
        if any([job.wait() for job in jobs]):
            sys.exit("a job failed")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1000 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def main():
    arguments = parse_arguments(__doc__, 10, lambda parser: parser.add_argument("--epochs", type=int, default=5))
    with_token = [start_milliseconds(arguments.build, True) - start_milliseconds(arguments.build, False)
                  for _ in range(10 * arguments.pairs)]
    middle, low, high = median_and_interval(with_token)
    print(f"two launchers with a token: {middle:.2f} ms ({low:.2f} to {high:.2f}) of processor time more")
    print(f"launcher with {RANKS} workers: {launcher_share(arguments.build):.2f} % of a core")
    ratios = []
    for pair in range(arguments.pairs):
        order = ["", UNWATCHED] if pair % 2 == 0 else [UNWATCHED, ""]
        speed = {prepare: images_per_second(arguments.build, prepare, arguments.epochs) for prepare in order}
        ratios.append(speed[UNWATCHED] / speed[""])
        print(f"watched {speed['']:.0f} images/s, unwatched {speed[UNWATCHED]:.0f}", flush=True)
    middle, low, high = median_and_interval(ratios)
    print(f"time of a step, watched by unwatched: {middle:.3f} ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
