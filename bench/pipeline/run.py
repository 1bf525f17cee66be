#!/usr/bin/env python3
"""Times ResNet-50 in two halves on two CPU devices of one core each, pipelined and not, and draws docs/pipeline.svg.

  bench/pipeline/run.py [--pairs 7] [--build build] [--svg FILE]

A training step by examples/model_parallel, of 64 images of 128 x 128, by the number of micro-batches. The ratio of times is
that of a round, in which each number has its turn, with an interval that holds its median with 95 % or more.
Needs matplotlib.
"""

import collections
import csv
import pathlib
import statistics
import subprocess
import sys
import tempfile

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot  # noqa: E402

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from pairs import ROOT, median_and_interval, parse_arguments  # noqa: E402

IMAGES, PIXELS = 64, 128
AT_LEAST = 1.6


def measure(arguments):
    """Seconds of each round by number of micro-batches; 0 means not pipelined."""
    with tempfile.TemporaryDirectory() as folder:
        rows = pathlib.Path(folder) / "rows.csv"
        program = arguments.build / "tests/model_parallel"
        subprocess.run([program, str(IMAGES), str(PIXELS), str(arguments.pairs), rows], check=True, stdout=subprocess.DEVNULL)
        seconds = collections.defaultdict(list)
        with rows.open() as file:
            for row in csv.DictReader(file):
                seconds[int(row["micro_batches"])].append(float(row["seconds"]))
    return seconds


def draw(seconds, svg):
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "syncbn", "font.size": 11})
    sizes = sorted(size for size in seconds if size > 0)
    times = [median_and_interval(seconds[size]) for size in sizes]
    figure, axes = pyplot.subplots(figsize=(7, 3.6))
    axes.errorbar(sizes, [time[0] for time in times], marker="o", color="tab:blue", capsize=3, label="pipelined (1f1b)",
                  yerr=[[time[0] - time[1] for time in times], [time[2] - time[0] for time in times]])
    axes.axhline(statistics.median(seconds[0]), color="tab:gray", linestyle="--", label="not pipelined")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("micro-batches")
    axes.set_ylabel("s per step")
    axes.set_title(f"ResNet-50 in two halves, {IMAGES} images of {PIXELS} x {PIXELS}, one core each", fontsize=11)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(svg, metadata={"Date": None})


def main():
    arguments = parse_arguments(__doc__, 7, lambda parser: parser.add_argument(
        "--svg", type=pathlib.Path, default=ROOT / "docs/pipeline.svg"))
    seconds = measure(arguments)
    best = 0
    for size in sorted(seconds):
        if size == 0:
            continue
        speedup, low, high = median_and_interval([plain / own for plain, own in zip(seconds[0], seconds[size])])
        best = max(best, speedup)
        print(f"{size:2} micro-batches: {statistics.median(seconds[size]):.3f} s a step, {speedup:.2f} times as fast "
              f"({low:.2f} to {high:.2f})")
    print(f"at best {best:.2f}, at least {AT_LEAST}: {'met' if best >= AT_LEAST else 'MISSED'}")
    draw(seconds, arguments.svg)


if __name__ == "__main__":
    main()
