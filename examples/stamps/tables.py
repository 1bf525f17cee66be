#!/usr/bin/env python3
"""Prints a table of mean and standard deviation over the seeds of sweeps, in Markdown.

    tables.py METRIC RANKS=SWEEP.CSV ...
"""

import csv
import statistics
import sys


def read_runs(path, metric):
    with open(path, newline="") as file:
        runs = list(csv.DictReader(file))
    for run in runs:
        if not run.get(metric):
            sys.exit(f"{path}: {run['folder']} has no {metric}; let the sweep go on to its end, or "
                     f"choose another of its columns")
    return runs


def cell(values):
    """Mean and spread; without spread for one seed."""
    if len(values) < 2:
        return f"{values[0]:.1f}" if values else ""
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"


def main():
    if len(sys.argv) < 3 or any("=" not in argument for argument in sys.argv[2:]):
        sys.exit(__doc__.strip())
    metric = sys.argv[1]
    lines = ["| ranks | images a rank | SyncBatchNorm | batch norm of each rank |",
             "|---|---|---|---|"]
    for argument in sys.argv[2:]:
        ranks, path = argument.split("=", 1)
        values = {}
        for run in read_runs(path, metric):
            key = int(run["batch_size"]), run["sync_batchnorm"]
            values.setdefault(key, []).append(100 * float(run[metric]))
        for batch_size in sorted({size for size, _ in values}):
            cells = [cell(values.get((batch_size, synchronised), []))
                     for synchronised in ["true", "false"]]
            lines.append(f"| {ranks} | {batch_size} | {' | '.join(cells)} |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
