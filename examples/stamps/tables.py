#!/usr/bin/env python3
"""Prints a table of mean and standard deviation over the seeds of sweeps, in Markdown.

    tables.py METRIC RANKS=SWEEP.CSV ...
"""

import csv
import statistics
import sys


def main():
    if len(sys.argv) < 3 or any("=" not in argument for argument in sys.argv[2:]):
        sys.exit(__doc__.strip())
    print("| ranks | images a rank | seeds | SyncBatchNorm | batch norm of each rank |")
    print("|---|---|---|---|---|")
    for argument in sys.argv[2:]:
        ranks, path = argument.split("=", 1)
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
        for batch_size in sorted({int(row["batch_size"]) for row in rows}):
            cells = []
            for synchronised in ["true", "false"]:
                values = [100 * float(row[sys.argv[1]]) for row in rows
                          if row["sync_batchnorm"] == synchronised
                          and int(row["batch_size"]) == batch_size]
                cells.append(f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}")
            print(f"| {ranks} | {batch_size} | {len(values)} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
