#!/usr/bin/env python3
"""Prints a table of mean and standard deviation over the seeds of sweeps, in percent, in Markdown.

    tables.py METRIC SWEEP.CSV ...
"""

import csv
import statistics
import sys


def refuse(message):
    print(f"tables.py: {message}", file=sys.stderr)
    sys.exit(2)


def read_runs(path, metric):
    try:
        with open(path, newline="") as file:
            runs = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        refuse(f"cannot read {path}: {error}")
    if not runs:
        refuse(f"{path} has no runs; give the sweep.csv of a sweep")
    for column in ["world_size", "batch_size", "sync_batchnorm", metric]:
        if column not in runs[0]:
            refuse(f"{path} has no column {column}; it has {', '.join(runs[0])}")
    return runs


def number(path, run, column):
    try:
        return float(run[column])
    except ValueError:
        refuse(f"{path}: {column} of {run['folder']} is '{run[column]}', not a number; let an "
               "unfinished sweep go on to its end")


def cell(values):
    """Mean and spread; without spread for one seed."""
    if len(values) < 2:
        return f"{values[0]:.1f}" if values else "none"
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"


def main():
    if len(sys.argv) < 3:
        refuse(__doc__.strip())
    metric = sys.argv[1]
    values = {}
    for path in sys.argv[2:]:
        for run in read_runs(path, metric):
            percent = 100 * number(path, run, metric)
            row = int(number(path, run, "world_size")), int(number(path, run, "batch_size"))
            values.setdefault(row, {}).setdefault(run["sync_batchnorm"], []).append(percent)
    print("| ranks | images a rank | SyncBatchNorm | batch norm of each rank |")
    print("|---|---|---|---|")
    for (ranks, batch_size), by_norm in sorted(values.items()):
        cells = [cell(by_norm.get(synchronised, [])) for synchronised in ["true", "false"]]
        print(f"| {ranks} | {batch_size} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
