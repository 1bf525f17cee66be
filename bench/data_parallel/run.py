#!/usr/bin/env python3
"""Times DataParallel over two CPU devices, of one core each.

  bench/data_parallel/run.py [--pairs 15] [--build build]

Beside our DistributedDataParallel on two ranks (ResNet-18 at 32 x 32, 64 images, statistics shared by both), beside
libtorch's torch::nn::parallel::data_parallel (the digits network, 64 images, plain batch norm) and beside itself
without sharing statistics. The ratio of times is that of a pair of slices, with an interval that holds its median with
95 % or more.
"""

import sys
import pathlib

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from pairs import by_turns, median_and_interval, parse_arguments  # noqa: E402
from ranks import Job  # noqa: E402

# comparison: model, images, steps of a slice; mode, batch norm and ranks of both sides; upper bound on the ratio
COMPARISONS = {
    "DDP on two ranks": ("resnet18", 64, 2, ("dp", "sync", 1), ("ddp", "sync", 2), 1.05),
    "libtorch's data_parallel": ("digits", 64, 50, ("dp", "local", 1), ("torch", "local", 1), 0.5),
    "statistics of each replica": ("resnet18", 64, 2, ("dp", "sync", 1), ("dp", "local", 1), 1.05),
}


def main():
    arguments = parse_arguments(__doc__, pairs=15)
    for name, (model, batch, steps, ours, theirs, most) in COMPARISONS.items():
        jobs = [Job([str(arguments.build / "bench/data_parallel_step"), model, mode, str(batch), norm], ranks=ranks)
                for mode, norm, ranks in (ours, theirs)]
        by_turns(jobs, 2, "steps", steps)
        pairs = by_turns(jobs, arguments.pairs, "steps", steps)
        ratio, low, high = median_and_interval([own["seconds"] / other["seconds"] for own, other in pairs])
        times = [1000 * sorted(pair[side]["seconds"] for pair in pairs)[len(pairs) // 2] for side in (0, 1)]
        print(f"{name}: {ratio:.3f} of its time ({low:.3f} to {high:.3f}), at most {most}: "
              f"{'met' if ratio <= most else 'MISSED'}; {times[0]:.2f} and {times[1]:.2f} ms a step", flush=True)
        for job in jobs:
            job.end()


if __name__ == "__main__":
    main()
