#!/usr/bin/env python3
"""What grows with the number of ranks, as far as one machine can show it: the digits network, batch 4 a rank.

  bench/ddp/measure_scale.py [--ranks 1 2 4 8 16 32] [--worker build/bench/ddp_step]

"init" is rank 0's init_process_group, "step" the median of slices of ten, "4 KiB" and "1 MiB" an
all_reduce, "fds" the open files of rank 0 and of the last rank, "threads" and "peak MiB" rank 0's
threads and peak memory. With more ranks than cores a step is the sum of the ranks' computing: look
at "ms a rank".
"""

import argparse
import os
import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from pairs import ROOT  # noqa: E402
from ranks import Job  # noqa: E402

SLICES = 3


def entries(process, kind):
    return len(os.listdir(f"/proc/{process.pid}/{kind}"))


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--worker", default=str(ROOT / "build/bench/ddp_step"))
    arguments = parser.parse_args()
    print(f"{'ranks':>5}{'init s':>9}{'step ms':>9}{'ms a rank':>11}{'4 KiB us':>10}{'1 MiB ms':>10}"
          f"{'fds 0':>7}{'fds last':>9}{'threads':>9}{'peak MiB':>10}")
    for ranks in arguments.ranks:
        job = Job([arguments.worker, "digits", "4", "8", "default", "1"], ranks)
        job.ask("steps", 3)
        step = 1000 * statistics.median(job.ask("steps", 10)["seconds"] for _ in range(SLICES))
        small = 1e6 * job.ask("all_reduce", 4096, 30)["seconds"]
        large = 1000 * job.ask("all_reduce", 1 << 20, 5)["seconds"]
        memory = job.ask("memory")
        first, last = job.ranks[0], job.ranks[-1]
        print(f"{ranks:5}{memory['init_seconds']:9.2f}{step:9.1f}{step / ranks:11.2f}{small:10.0f}{large:10.2f}"
              f"{entries(first, 'fd'):7}{entries(last, 'fd'):9}{entries(first, 'task'):9}"
              f"{memory['peak_mib']:10.0f}", flush=True)
        job.end()


if __name__ == "__main__":
    main()
