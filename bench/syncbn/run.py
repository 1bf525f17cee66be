#!/usr/bin/env python3
"""Measures what SyncBatchNorm and the exchange between ranks of one host cost, each beside its peer.

  bench/syncbn/run.py [--only layers exchange resnet50 digits] [--pairs 7] [--python PYTHON]
                      [--build build] [--json FILE]

"layers": ResNet-50's batch-norm layers at batch 4, one rank: SyncBatchNorm / torch::nn::BatchNorm2d, and
with addition and ReLU fused / apart (layer_time). "exchange": SyncBatchNorm's messages and 100 MB of gradients
through shared memory / over Gloo, two ranks (exchange_bench). "resnet50": a step at 224 x 224, batch 2 a rank,
two ranks: SyncBatchNorm / torch::nn::BatchNorm2d per rank. "digits": a step of the digits network / Python's
DistributedDataParallel over Gloo. One thread a rank; all by turns; ratios are medians, and below 1 ours takes
less time, save for the exchange, where they say how many times faster it is.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from pairs import PYTHON, ROOT, by_turns, median_and_interval, processor_times, stolen_share  # noqa: E402
from ranks import Job  # noqa: E402

TOLERABLY_STOLEN = 0.01
ENVIRONMENT = dict(os.environ, OMP_NUM_THREADS="1")


def show(name, ratio, target, details, at_least=False):
    met = ratio >= target if at_least else ratio <= target
    print(f"{name:44}{ratio:9.3f}   {'at least' if at_least else 'at most':8}{target:6}  "
          f"{'met' if met else 'MISSED':8}{details}", flush=True)
    return {"name": name, "ratio": ratio, "target": target, "met": met, "details": details}


def output_of(*words):
    return subprocess.run([str(word) for word in words], env=ENVIRONMENT, check=True, text=True,
                          stdout=subprocess.PIPE).stdout


def on_ranks(arguments, ranks, *words):
    return output_of(arguments.build / "bin/syncbn-launch", "--standalone", f"--nproc_per_node={ranks}",
                     "--prefix=off", *words)


def layers(arguments):
    targets = {"layers, contiguous": 0.6, "layers, channels-last": 0.8,
               "fused, contiguous": 0.75, "fused, channels-last": 0.75}
    for options, kind in (([], ""), (["--keep_memory"], ", memory kept")):
        said = json.loads(output_of(arguments.build / "bench/layer_time", 2 * arguments.pairs + 1, *options))
        for name, figures in said.items():
            ours, theirs = figures["ms"]
            yield show(name + kind, figures["ratio"], targets[name], f"{ours:.1f} and {theirs:.1f} ms")


def exchange(arguments):
    said = json.loads(on_ranks(arguments, 2, arguments.build / "bench/exchange_bench", "--json"))
    for floats, (ours, theirs) in said["microseconds"].items():
        yield show(f"exchange of {floats} floats", theirs / ours, 50, f"{ours:.1f} and {theirs:.1f} us",
                   at_least=True)
    ours, theirs = said["gb_per_s"]
    yield show("all-reduce of 100 MB", ours / theirs, 3, f"{ours:.2f} and {theirs:.2f} GB/s", at_least=True)


def resnet50(arguments):
    shape = [arguments.build / "bench/ddp_step", "resnet50", "2", "224", "default", "1"]
    jobs = [Job([str(word) for word in [*shape, *norm]]) for norm in (["sync"], [])]
    for job in jobs:
        job.ask("steps", 1)
    pairs = by_turns(jobs, arguments.pairs, "steps", 2)
    for job in jobs:
        job.end()
    ratio, low, high = median_and_interval([a["seconds"] / b["seconds"] for a, b in pairs])
    ours, theirs = (sorted(pair[side]["seconds"] for pair in pairs)[len(pairs) // 2] for side in (0, 1))
    yield show("ResNet-50 step, batch 2 a rank", ratio, 1.0,
               f"{1000 * ours:.0f} and {1000 * theirs:.0f} ms ({low:.3f} to {high:.3f})")


def digits(arguments):
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "digits.json"
        output_of(ROOT / "bench/ddp/run.py", "--model", "digits", "--case", "defaults", "--pairs", arguments.pairs,
                  "--worker", arguments.build / "bench/ddp_step", "--python", arguments.python, "--json", file)
        result = json.loads(file.read_text())[0]
    ours, theirs = result["step_ms"]
    low, high = result["interval"]
    yield show("digits step, beside Python's DDP", result["ratio"], 0.5,
               f"{ours:.2f} and {theirs:.2f} ms ({low:.3f} to {high:.3f})")


PARTS = {"layers": layers, "exchange": exchange, "resnet50": resnet50, "digits": digits}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--python", default=PYTHON)
    parser.add_argument("--build", type=lambda path: pathlib.Path(path).resolve(), default=ROOT / "build")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    print(f"{'':44}{'ratio':>9}   {'target':16}{'':8}ours and the other's")
    results = []
    for part in arguments.only:
        before = processor_times()
        results += PARTS[part](arguments)
        stolen = stolen_share(before, processor_times())
        if stolen > TOLERABLY_STOLEN:
            print(f"  while {part} was measured, the host gave {stolen:.1%} of the processors' time to others: "
                  "ranks that wait for each other all lose what one loses")
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
