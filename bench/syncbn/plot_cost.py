#!/usr/bin/env python3
"""Measures what synchronising a layer costs by ranks and channels, and draws docs/syncbn_cost.svg.

  bench/syncbn/plot_cost.py [--ranks 1 2 4 8] [--build build] [--svg FILE]

The exchanges of one layer's forward and backward and the merging (exchange_cost), through shared memory and over
Gloo. With more ranks than cores the ranks take turns on them: the figures then hold the waiting for a core as well.
Needs matplotlib.
"""

import argparse
import json
import os
import pathlib

import matplotlib
from run import ROOT, on_ranks

matplotlib.use("svg")
from matplotlib import pyplot  # noqa: E402


def measure(arguments, *options):
    """Microseconds by number of ranks and of channels."""
    rows = {}
    for ranks in arguments.ranks:
        said = on_ranks(arguments, ranks, arguments.build / "bench/exchange_cost", *options)
        rows[ranks] = {int(channels): cost for channels, cost in json.loads(said).items()}
    return rows


def show(name, rows):
    channels = sorted(next(iter(rows.values())))
    print(f"\n{name}, microseconds\n\n| ranks | " + " | ".join(f"{c} channels" for c in channels) + " |")
    print("|---" * (len(channels) + 1) + "|")
    for ranks, costs in rows.items():
        print(f"| {ranks} | " + " | ".join(f"{costs[c]:.1f}" for c in channels) + " |")


def draw(ways, path):
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "syncbn", "font.size": 11})
    figure, axes = pyplot.subplots(figsize=(7.2, 3.8), layout="constrained")
    colors = ("#1668b3", "#2e8540", "#c4501b", "#7a3e9d")
    for (name, rows), style in zip(ways.items(), ("-", ":")):
        for channels, color in zip(sorted(next(iter(rows.values()))), colors):
            axes.plot(list(rows), [costs[channels] for costs in rows.values()], style, color=color,
                      marker="o", markersize=4, label=f"{channels} channels, {name}")
    axes.set(xscale="log", yscale="log", xlabel=f"ranks on one host of {os.cpu_count()} cores",
             ylabel="microseconds", title="What synchronising a layer costs, forward and backward")
    axes.set_xticks(list(rows), [str(ranks) for ranks in rows])
    axes.minorticks_off()
    axes.grid(color="#ddd")
    axes.legend(fontsize=8, ncols=1, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--build", type=lambda path: pathlib.Path(path).resolve(), default=ROOT / "build")
    parser.add_argument("--svg", default=str(ROOT / "docs/syncbn_cost.svg"))
    arguments = parser.parse_args()
    ways = {"shared memory": measure(arguments), "Gloo": measure(arguments, "--gloo")}
    for name, rows in ways.items():
        show(name, rows)
    draw(ways, arguments.svg)


if __name__ == "__main__":
    main()
