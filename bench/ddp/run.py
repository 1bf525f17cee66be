#!/usr/bin/env python3
"""Times DistributedDataParallel beside Python's: two ranks of each on this host, by turns.

  bench/ddp/run.py [--model digits|resnet18|resnet50|deeplabv3_resnet50|retinanet_resnet50_fpn ...]
                   [--case same|defaults|sync ...] [--pairs 7]
                   [--worker build/bench/ddp_step] [--python PYTHON] [--json FILE]

Both jobs live at the same time, one computes while the other waits for its next command. A pair is a
slice of steps of each; the ratio ours / Python's is that of a pair, its median and an interval of
95 % or more (order statistics) are printed. "same": both contiguous, both with the fused optimizer;
"defaults": what `train` chooses against what Python does when told nothing; "sync": the same, ours with SyncBatchNorm and
Python's with the batch norm of each rank; "python": Python on both sides, ours over the backend syncbn (target
syncbn_python) and Python's over Gloo. "overlap" is backward with the exchange
of gradients over backward without it (no_sync), "bus" the bandwidth of an all_reduce, 2 (n - 1) / n
bytes a byte, "memory" a rank's peak. One thread a rank.
"""

import argparse
import json
import os
import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from pairs import PYTHON, ROOT, by_turns, median_and_interval  # noqa: E402
from ranks import RANKS, Job  # noqa: E402

# model: batch per rank, size of an image, steps of a slice, warm-up steps
MODELS = {"digits": (8, 8, 300, 50), "resnet18": (32, 32, 2, 1), "resnet50": (4, 224, 1, 1),
          "deeplabv3_resnet50": (2, 256, 1, 1), "retinanet_resnet50_fpn": (2, 256, 1, 1)}
# case: memory format, fused optimizer and, if given, batch norm or backend; of ours, then of Python's
CASES = {"same": (("contiguous", "1"), ("contiguous", "1")),
         "defaults": (("default", "1"), ("contiguous", "0")),
         "sync": (("default", "1", "sync"), ("contiguous", "0")),
         "python": (("contiguous", "1", "syncbn"), ("contiguous", "1", "gloo"))}
ALL_REDUCE = {"4 KiB": (4096, 200), "1 MiB": (1 << 20, 30), "25 MiB": (25 << 20, 5)}
SAME_LOSS = 1e-3  # upper bound on the relative difference of the first losses: both compute the same


def compare(model, case, arguments):
    batch, size, steps, warm_up = MODELS[model]
    ours, theirs = CASES[case]
    shape = [model, str(batch), str(size)]
    in_python = [arguments.python, str(ROOT / "bench/ddp/ddp_step.py"), *shape]
    jobs = [Job([*(in_python if case == "python" else [arguments.worker, *shape]), *ours]),
            Job([*in_python, *theirs])]
    first = [job.ask("steps", warm_up) for job in jobs]
    is_other = abs(first[0]["loss"] - first[1]["loss"]) > SAME_LOSS * abs(first[1]["loss"])
    if is_other and case != "sync":
        sys.exit(f"bench/ddp: {model}: not the same network, the losses are {first}")
    pairs = by_turns(jobs, arguments.pairs, "steps", steps)
    middle, low, high = median_and_interval([a["seconds"] / b["seconds"] for a, b in pairs])
    result = {"model": model, "case": case, "pairs": arguments.pairs,
              "step_ms": [1000 * statistics.median(pair[side]["seconds"] for pair in pairs)
                          for side in (0, 1)],
              "ratio": middle, "interval": [low, high]}
    overlap = by_turns(jobs, 1, "overlap", max(steps // 10, 2))[0]
    result["backward_ms"] = [1000 * side["backward"] for side in overlap]
    result["no_sync_ms"] = [1000 * side["no_sync"] for side in overlap]
    result["peak_mib"] = [job.ask("memory")["peak_mib"] for job in jobs]
    for job in jobs:
        job.end()
    return result


def show(result):
    step, backward, alone = result["step_ms"], result["backward_ms"], result["no_sync_ms"]
    overlap = [with_ / without for with_, without in zip(backward, alone)]
    memory = result["peak_mib"]
    print(f"{result['model']:24}{result['case']:10}{step[0]:10.2f}{step[1]:10.2f} ms"
          f"{result['ratio']:8.3f}  {result['interval'][0]:.3f} to {result['interval'][1]:.3f}"
          f"{overlap[0]:8.2f}{overlap[1]:8.2f}{memory[0]:8.0f}{memory[1]:8.0f} MiB", flush=True)


def all_reduce(arguments):
    """Rows of bus bandwidth: ours, and Gloo's in Python."""
    shape = ["digits", "1", "8", "contiguous", "1"]
    jobs = [Job([arguments.worker, *shape]),
            Job([arguments.python, str(ROOT / "bench/ddp/ddp_step.py"), *shape])]
    rows = []
    for name, (size, count) in ALL_REDUCE.items():
        pairs = by_turns(jobs, arguments.pairs, "all_reduce", size, count)
        middle, low, high = median_and_interval([a["seconds"] / b["seconds"] for a, b in pairs])
        moved = 2 * (RANKS - 1) / RANKS * size
        bus = [moved / statistics.median(pair[side]["seconds"] for pair in pairs) / 1e9
               for side in (0, 1)]
        rows.append({"all_reduce": name, "gb_per_s": bus, "ratio": middle, "interval": [low, high]})
        print(f"{'bus':24}{name:10}{bus[0]:10.3f}{bus[1]:10.3f} GB/s{middle:6.3f}  "
              f"{low:.3f} to {high:.3f}", flush=True)
    for job in jobs:
        job.end()
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", choices=[*MODELS, "all_reduce"],
                        default=[*MODELS, "all_reduce"])
    parser.add_argument("--case", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--worker", default=str(ROOT / "build/bench/ddp_step"))
    parser.add_argument("--python", default=PYTHON)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "build/python"), *filter(None, [os.environ.get("PYTHONPATH")])])
    print(f"{'':34}{'ours':>10}{'Python':>10}{'ratio':>11}  interval      overlap of both  memory")
    results = []
    for model in arguments.model:
        if model == "all_reduce":
            results += all_reduce(arguments)
            continue
        for case in arguments.case:
            results.append(compare(model, case, arguments))
            show(results[-1])
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
