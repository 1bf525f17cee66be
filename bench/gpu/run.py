#!/usr/bin/env python3
"""Measures training on one GPU beside Python's torch of the same version, both in turn on the same GPU, and
what several GPUs cost each other.

  bench/gpu/run.py PART [--pairs 11] [--build build] [--python PYTHON] [--gpus N] [--json FILE] [--tiny]

Parts: step-256, step-32       a step of ResNet-50 (bf16, channels-last), eager Python's time / ours
       compiled-256            the same beside torch.compile
       layers-256, layers-32   SyncBatchNorm + ReLU of ResNet-50's 53 layers, forward and backward, with the
                               exchange forced (an all-gather and an all-reduce of NCCL): our time /
                               torch's SyncBatchNorm's, and / torch's BatchNorm2d's

Parts on several GPUs, --gpus of them, a rank started by syncbn-launch on each:
       sync-cost               a step of ResNet-50 in DistributedDataParallel, batch 64 per rank, with SyncBatchNorm
                               / with BatchNorm2d
       scaling                 a step on one GPU / a step on 2, 4 ... GPUs, batch 64 per rank

Ratios are medians over pairs of slices, with an interval of 95 % or more (order statistics). On a GPU without
the memory for both sides of a batch (55 GB for 256 images of a step), parts on one GPU take the half, a quarter
..., say so, and have no target. --tiny: sizes for the fake CUDA devices (tests/fake_cuda), whose times say nothing.
"""

import json
import os
import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from pairs import ROOT, by_turns, median_and_interval, parse_arguments  # noqa: E402
from ranks import Job  # noqa: E402

# batches up to this: steps of ResNet-50 in a slice, passes through its layers in a slice
COUNTS = {2: (1, 1), 32: (20, 30), 64: (15, 20), 128: (10, 15), 256: (5, 10)}
# Upper bounds on a process's GPU memory in bytes: per image of a step of ResNet-50, or of a pass through its
# layers; and per process in addition. Computed, not measured: activations in bf16, and cuDNN's workspaces.
IMAGE_BYTES = {"step": 100e6, "layers": 45e6}
PROCESS_BYTES = 2e9
RESNET50_LAYERS = 53
RANK_BATCH = 64  # images per rank, on several GPUs
TARGET_GPUS = 8  # the targets for several GPUs hold from this number on


def ours(arguments):
    return Job([str(arguments.build / "bench/gpu_worker")], ranks=1)


def theirs(arguments):
    return Job([arguments.python, str(ROOT / "bench/gpu/gpu_worker.py")], ranks=1)


def ranks(arguments, count):
    return Job([str(arguments.build / "bin/syncbn-launch"), "--standalone", f"--nproc_per_node={count}", "--prefix=off",
                str(arguments.build / "bench/gpu_worker")], ranks=1)


def warm_up(arguments):
    """Number of passes before a measurement."""
    return 1 if arguments.tiny else 3


def fitting(batch, what, free):
    """The largest of batch, its half, its quarter ... for which both sides fit into memory at once."""
    while batch > 1 and 2 * (batch * IMAGE_BYTES[what] + PROCESS_BYTES) > free:
        batch //= 2
    return batch


def batch_that_fits(batch, what, arguments):
    """The batch to measure in place of `batch`, its description in the row's name, and whether it has a target."""
    if arguments.tiny:
        return 2, f"batch {batch}", True
    job = ours(arguments)
    free = job.ask("memory")["free"]
    job.end()
    fits = fitting(batch, what, free)
    if fits == batch:
        return batch, f"batch {batch}", True
    return fits, f"batch {fits} ({batch} may not fit into {free / 1e9:.0f} GB)", False


def counts_of(shape):
    """The entry of COUNTS for this batch."""
    return COUNTS[min(batch for batch in COUNTS if batch >= shape)]


def compare(name, jobs, count, arguments, target, at_least):
    """A row: the ratio is Python's time / ours if it must be at least `target`, else ours / Python's."""
    for job in jobs:
        job.ask("time", max(count, warm_up(arguments)))
    pairs = by_turns(jobs, arguments.pairs, "time", count)
    ratios = [b["seconds"] / a["seconds"] if at_least else a["seconds"] / b["seconds"] for a, b in pairs]
    ratio, low, high = median_and_interval(ratios)
    return {"name": name, "ratio": ratio, "interval": [low, high], "target": target, "at_least": at_least,
            "milliseconds": [1000 * statistics.median(pair[side]["seconds"] for pair in pairs) for side in (0, 1)]}


def trace(job, arguments):
    answer = job.ask("trace", warm_up(arguments))
    return {key: answer[key] for key in ("launches", "copies", "waits")}


def step(batch, arguments, kind="eager"):
    """Measures a step with each of our batch norms, since a program would use the faster one."""
    size = 32 if arguments.tiny else 224
    shape, said, has_target = batch_that_fits(batch, "step", arguments)
    target = {"eager": 1, "compiled": 0.9}[kind] if has_target and batch == 256 else None
    other = theirs(arguments)
    other.ask("network", shape, size, kind)
    result = {"rows": [], "traces": []}
    for norm in ("sync", "local"):
        job = ours(arguments)
        job.ask("network", shape, size, norm)
        name = (f"ResNet-50 step, {said}, {'SyncBatchNorm' if norm == 'sync' else 'BatchNorm2d'} / "
                f"{kind} Python")
        result["rows"].append(compare(name, [job, other], counts_of(shape)[0], arguments, target, at_least=True))
        if kind == "eager":
            result["traces"].append({"name": f"ResNet-50 step, {said}, {norm}", **trace(job, arguments)})
        job.end()
    if not arguments.tiny:
        result["traces"].append({"name": f"ResNet-50 step, {said}, {kind} Python", **trace(other, arguments)})
    other.end()
    return result


def layers(batch, arguments):
    shape, said, has_target = batch_that_fits(batch, "layers", arguments)
    divisor = 8 if arguments.tiny else 1
    result = {"rows": [], "traces": []}
    job = ours(arguments)
    job.ask("layers", shape, divisor)
    kinds = {"sync": ("torch's SyncBatchNorm", 1.05), "cudnn": ("torch's BatchNorm2d", None)}
    for kind, (what, target) in kinds.items():
        other = theirs(arguments)
        other.ask("layers", shape, divisor, kind)
        result["rows"].append(compare(f"SyncBatchNorm + ReLU, {said} / {what} + ReLU", [job, other],
                                      counts_of(shape)[1], arguments, target if has_target else None,
                                      at_least=False))
        if not arguments.tiny:
            result["traces"].append(per_layer(f"{what} + ReLU", trace(other, arguments)))
        other.end()
    result["traces"].insert(0, per_layer("SyncBatchNorm + ReLU", trace(job, arguments)))
    job.end()
    return result


def per_layer(name, traced):
    return {"name": f"a layer, {name}", **{key: value / RESNET50_LAYERS for key, value in traced.items()}}


def in_turn(job, names, count, arguments):
    """Seconds of a pass by name, `pairs` times each. The job has kept the passes under these names."""
    seconds = {name: [] for name in names}
    for pair in range(0 if arguments.tiny else -1, arguments.pairs):
        for name in names if pair % 2 else names[::-1]:
            job.ask("use", name)
            took = job.ask("time", count)["seconds"]
            if pair >= 0:  # round -1 warms up
                seconds[name].append(took)
    return seconds


def several_row(name, first, second, target, at_least, arguments):
    """A row: the ratio is the first's seconds / the second's."""
    ratio, low, high = median_and_interval([a / b for a, b in zip(first, second)])
    return {"name": name, "ratio": ratio, "interval": [low, high],
            "target": target if arguments.gpus >= TARGET_GPUS else None, "at_least": at_least,
            "milliseconds": [1000 * statistics.median(side) for side in (first, second)]}


def rank_network(arguments):
    """Batch of a rank, pixels of an image, and steps in a slice."""
    return (2, 32, 1) if arguments.tiny else (RANK_BATCH, 224, 20)


def sync_cost(arguments):
    batch, size, steps = rank_network(arguments)
    job = ranks(arguments, arguments.gpus)
    for norm in ("sync", "local"):
        job.ask("network", batch, size, norm)
        job.ask("keep", norm)
    seconds = in_turn(job, ["sync", "local"], steps, arguments)
    job.end()
    return {"several": [several_row(f"ResNet-50 step, {arguments.gpus} GPUs, batch {RANK_BATCH}, SyncBatchNorm / "
                                    "BatchNorm2d", seconds["sync"], seconds["local"], 1.05, False, arguments)]}


def scaling(arguments):
    batch, size, steps = rank_network(arguments)
    counts = [count for count in (1, 2, 4) if count < arguments.gpus] + [arguments.gpus]
    seconds = {}
    for count in counts:
        job = ranks(arguments, count)
        job.ask("network", batch, size, "sync")
        job.ask("keep", "step")
        seconds[count] = in_turn(job, ["step"], steps, arguments)["step"]
        job.end()
    return {"several": [several_row(f"ResNet-50 step, batch {RANK_BATCH} per rank, 1 GPU / {count} GPUs",
                                    seconds[1], seconds[count], 0.95 if count == arguments.gpus else None, True,
                                    arguments) for count in counts[1:]]}


SEVERAL = {"sync-cost": sync_cost, "scaling": scaling}
PARTS = {"step-256": lambda given: step(256, given), "step-32": lambda given: step(32, given),
         "compiled-256": lambda given: step(256, given, kind="compiled"),
         "layers-256": lambda given: layers(256, given), "layers-32": lambda given: layers(32, given),
         **SEVERAL}


def add_arguments(parser):
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--tiny", action="store_true")


def main():
    arguments = parse_arguments(__doc__, 11, add_arguments)
    arguments.build = arguments.build.resolve()
    if arguments.part not in SEVERAL:
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    elif arguments.gpus < 2:
        sys.exit(f"bench: {arguments.part} needs --gpus, at least 2")
    result = PARTS[arguments.part](arguments)
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
