#!/usr/bin/env python3
"""Times `train` beside a Python script that does the same (train.py): two ranks of each on this host, by turns.

  bench/train/run.py [--part speed|bf16|saving|logging|start|resume ...] [--model digits|resnet18|resnet50 ...]
                     [--pairs 7] [--reference DIR] [--folder DIR] [--build build] [--python PYTHON] [--json FILE]

Each side is started anew for each figure; images a second are the median of its epochs after the first, "memory" is
rank 0's peak. A ratio is that of a pair of runs; its median and an interval of 95 % or more (order statistics) are
printed (for fewer than six pairs, their range). One thread a rank, batch norm of each rank (Python's SyncBatchNorm refuses CPU tensors).

speed: "same": both contiguous and with the fused optimizer; "defaults": what each does when told nothing.
bf16: images a second with amp: bf16 over those of float32, of each side.
saving: ResNet-50 with a checkpoint every 10 steps over none, of each side; Python's script calls torch.save.
logging: digits with a line for every step (of ours in log.jsonl, metrics.csv and TensorBoard's file, without histograms),
and with the report, over none of that, of each side.
start: seconds from the command to the first step's line: syncbn-launch with `train`, and torchrun with torchvision's
references/classification/train.py, which --reference names the folder of (the Python needs torchvision).
resume: seconds from the command to the first step of a run that was stopped in the middle of 1,281,167 images, drawn or
in files (of 8 x 8 pixels, made in --folder where it has none), and of the same run from its beginning.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from pairs import PYTHON, ROOT, by_turns, median_and_interval  # noqa: E402
from ranks import RANKS, free_port  # noqa: E402

# model: size of an image, batch per rank, steps per epoch, epochs
MODELS = {"digits": (8, 8, 90, 6), "resnet18": (32, 32, 3, 4), "resnet50": (224, 8, 2, 4)}
IMAGENET = 1281167
CLASSES = 1000
ONE_COLOUR = """
import sys
from PIL import Image
for label, folder in enumerate(sys.argv[2:]):
    Image.new("RGB", [int(sys.argv[1])] * 2, (label % 256, label // 4, 128)).save(folder + "/0.jpg")
"""
FIRST_STEP = {"ours": re.compile(r"step 1/"), "theirs": re.compile(r"Epoch: \[0\] +\[ *0/")}


class Ranks:
    """One side: runs a command on all ranks, and returns the figures of the run."""

    def __init__(self, command, options=()):
        self.command, self.options = command, list(options)

    def ask(self, *more):
        port = str(free_port())
        with tempfile.TemporaryDirectory(prefix="bench-train-") as folder:
            processes = []
            for rank in range(RANKS):
                environment = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS),
                                   LOCAL_WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
                                   OMP_NUM_THREADS="1")
                with open(pathlib.Path(folder) / f"out-{rank}", "w", encoding="utf-8") as out:
                    processes.append(subprocess.Popen([*self.command, *self.options, *more], cwd=folder, stdout=out,
                                                      stderr=subprocess.STDOUT, env=environment))
            peaks = {}
            for _ in processes:
                pid, status, usage = os.wait4(-1, 0)
                rank = [process.pid for process in processes].index(pid)
                peaks[rank] = usage.ru_maxrss / 1024
                if status != 0:
                    for process in processes:
                        process.kill()
                    said = (pathlib.Path(folder) / f"out-{rank}").read_text(encoding="utf-8")
                    sys.exit(f"{said}bench/train: status {status} of rank {rank} of {' '.join(processes[0].args)}")
            return {**self.figures(pathlib.Path(folder)), "peak_mib": peaks[0]}


class Train(Ranks):
    @staticmethod
    def figures(folder):
        lines = (folder / "run/log.jsonl").read_text(encoding="utf-8").splitlines()
        epochs = [line for line in map(json.loads, lines) if line["event"] == "epoch"]
        return {"rate": statistics.median(line["images_per_second"] for line in epochs[1:]),
                "loss": epochs[-1]["train_loss"]}


class Script(Ranks):
    @staticmethod
    def figures(folder):
        lines = (folder / "out-0").read_text(encoding="utf-8").splitlines()
        epochs = [json.loads(line) for line in lines if line.startswith("{")]
        return {"rate": statistics.median(line["images_per_second"] for line in epochs[1:]),
                "loss": epochs[-1]["loss"]}


def train(arguments, model, *options, steps=None, epochs=None):
    size, batch, default_steps, default_epochs = MODELS[model]
    samples, epochs = RANKS * batch * (steps or default_steps), epochs or default_epochs
    network = data = "{type: digits}"
    if model != "digits":
        network = f"{{type: {model}, small_input: {str(size < 64).lower()}}}"
        data = f"{{type: synthetic, size: {samples}, test_size: {RANKS}, height: {size}, width: {size}, classes: 10}}"
    return Train([str(arguments.build / "bin/train"), "--config", "/dev/null", "--run_dir=run",
                  f"--model={network}", f"--data={data}", f"--batch_size={batch}", f"--epochs={epochs}",
                  f"--eval_interval={epochs}", "--sync_batchnorm=false", "--loader.drop_last=true",
                  "--optimizer={type: sgd, lr: 0.1, momentum: 0.9, weight_decay: 1e-4}", "--schedule.type=cosine",
                  "--checkpoint.every=1000000step"], options)


def script(arguments, model, *options, steps=None, epochs=None):
    size, batch, default_steps, default_epochs = MODELS[model]
    samples = 1442 if model == "digits" else RANKS * batch * (steps or default_steps)
    return Script([arguments.python, str(HERE / "train.py"), model, f"--size={size}", f"--batch={batch}",
                   f"--samples={samples}", f"--epochs={epochs or default_epochs}"], options)


def figures_of(name, pairs, kind):
    """Compares two rates or two times. Prints and returns the result."""
    first, second = ([pair[side][kind] for pair in pairs] for side in (0, 1))
    middle, low, high = median_and_interval([a / b for a, b in zip(first, second)])
    result = {"name": name, "pairs": len(pairs), "ratio": middle, "interval": [low, high],
              kind: [statistics.median(first), statistics.median(second)]}
    print(f"{name:34}{result[kind][0]:10.4g}{result[kind][1]:10.4g}{middle:9.3f}  {low:.3f} to {high:.3f}", end="")
    if "peak_mib" in pairs[0][0]:
        peaks = [statistics.median(pair[side]["peak_mib"] for pair in pairs) for side in (0, 1)]
        result["peak_mib"] = peaks
        print(f"{peaks[0]:9.0f}{peaks[1]:7.0f} MiB{peaks[0] / peaks[1]:7.2f}", end="")
    print(flush=True)
    return result


def head(first, second, unit):
    print(f"\n{unit:34}{first:>10}{second:>10}{'ratio':>9}  interval", flush=True)


def speed(arguments):
    head("ours", "Python", "images/s")
    results = []
    for model in arguments.model:
        cases = {"same": (["--memory_format=contiguous"], ["--fused"]), "defaults": ([], [])}
        for case, (ours, theirs) in cases.items():
            jobs = [train(arguments, model, *ours), script(arguments, model, *theirs)]
            results.append(figures_of(f"{model}, {case}", by_turns(jobs, arguments.pairs), "rate"))
    return results


def with_and_without(arguments, name, model, ours, theirs, ours_without=(), **length):
    """Compares runs with and without options, on each side: `ours` for `train`, `theirs` for the script."""
    return [figures_of(f"{name}, {side}", by_turns([make(arguments, model, *options, **length),
                                                    make(arguments, model, *without, **length)], arguments.pairs), "rate")
            for side, make, options, without in (("ours", train, ours, ours_without), ("Python", script, theirs, ()))]


def bf16(arguments):
    head("bf16", "float32", "images/s")
    results = []
    for model in (model for model in arguments.model if model != "digits"):
        results += with_and_without(arguments, model, model, ["--amp=bf16"], ["--amp=bf16"])
    return results


def saving(arguments):
    head("saving", "not", "images/s")
    return with_and_without(arguments, "resnet50", "resnet50", ["--checkpoint.every=10step"], ["--save_interval=10"],
                            steps=20, epochs=2)


def logging(arguments):
    head("logging", "not", "images/s")
    return with_and_without(arguments, "digits", "digits", ["--log_interval=1"], ["--log_interval=1"],
                            ["--log_interval=0", "--report=false"], epochs=20)


class UntilFirstStep:
    """A command that is terminated after it has reported a step. The second of two runs counts: the first has to get
    back memory that the other side used, which takes a second on virtual machines."""

    def __init__(self, command, said, cwd, prepare=lambda: None):
        self.command, self.said, self.cwd, self.prepare = command, said, cwd, prepare

    def ask(self):
        self.run()
        return {"seconds": self.run()}

    def run(self):
        self.prepare()
        begin = time.perf_counter()
        process = subprocess.Popen(self.command, cwd=self.cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                   text=True, env=dict(os.environ, OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1"))
        said = []
        for line in process.stdout:
            said.append(line)
            if self.said.search(line):
                break
        else:
            sys.exit("".join(said))
        seconds = time.perf_counter() - begin
        process.terminate()
        process.stdout.read()
        process.wait()
        return seconds


def make_images(python, folder, images, classes, size):
    """Makes one JPEG file for each class, with many hard links."""
    folders = [folder / f"{label:04}" for label in range(classes)]
    for each in folders:
        each.mkdir(parents=True)
    subprocess.run([python, "-c", ONE_COLOUR, str(size), *map(str, folders)], check=True)
    for label, each in enumerate(folders):
        for index in range(1, images // classes + (label < images % classes)):
            os.link(each / "0.jpg", each / f"{index}.jpg")


def start(arguments):
    if not arguments.reference:
        sys.exit("bench/train: --part start needs --reference /path/to/references/classification of torchvision")
    head("ours", "torchrun", "seconds to the first step")
    results = []
    for split, side in (("train", 256), ("val", 240)):
        make_images(arguments.python, arguments.scratch / split, 64, 10, side)
    data = {"train": arguments.scratch / "train", "val": arguments.scratch / "val"}
    reference = pathlib.Path(arguments.reference).resolve() / "train.py"
    for size in (64, 224):
        ours = [*launch_train(arguments), "--model.type=resnet18", "--batch_size=8",
                f"--data={{type: image_folder, train: {data['train']}, val: {data['val']}, "
                f"transforms: [{{type: random_resized_crop, size: {size}}}, random_horizontal_flip], "
                f"test_transforms: [{{type: resize, size: {size}}}, {{type: center_crop, size: {size}}}]}}",
                "--sync_batchnorm=false", "--log_interval=1", "--run_dir=run", "--overwrite",
                "--max_steps=1"]  # `train` prints the line only with the next step, or after the last one
        torchrun = pathlib.Path(arguments.python).parent / "torchrun"
        theirs = [str(torchrun), "--standalone", f"--nproc_per_node={RANKS}", str(HERE / "reference_on_cpu.py"),
                  str(reference), "--data-path", str(arguments.scratch), "--model", "resnet18", "--device", "cpu",
                  "--batch-size", "8", "--workers", "2", "--print-freq", "1", "--train-crop-size", str(size),
                  "--val-resize-size", str(size), "--val-crop-size", str(size)]
        jobs = [UntilFirstStep(ours, FIRST_STEP["ours"], arguments.scratch),
                UntilFirstStep(theirs, FIRST_STEP["theirs"], arguments.scratch)]
        results.append(figures_of(f"resnet18 at {size}", by_turns(jobs, arguments.pairs), "seconds"))
    return results


def launch_train(arguments):
    return [str(arguments.build / "bin/syncbn-launch"), "--standalone", f"--nproc_per_node={RANKS}", "train",
            "--config", "/dev/null"]


def resume(arguments):
    head("resumed", "anew", "seconds to the first step")
    folder = arguments.folder / "imagenet-8x8"
    if not folder.exists():
        shutil.rmtree(arguments.folder / "making", ignore_errors=True)
        make_images(arguments.python, arguments.folder / "making", IMAGENET, CLASSES, 8)
        (arguments.folder / "making").rename(folder)
    results = []
    crop = "[{type: center_crop, size: 8}]"
    sets = {"drawn": [f"--data={{type: synthetic, size: {IMAGENET}, test_size: {RANKS}, height: 8, width: 8, "
                      f"classes: {CLASSES}}}"],
            "files": [f"--data={{type: image_folder, train: {folder}, transforms: {crop}, test_transforms: {crop}, "
                      f"cache_dir: {arguments.folder}}}", "--val_fraction=0.001"]}
    for name, data in sets.items():
        common = [*launch_train(arguments), "--model={type: digits, width: 4}", "--batch_size=512", *data,
                  "--log_interval=1"]
        stopped = arguments.scratch / f"stopped-{name}"
        half = IMAGENET // (2 * RANKS * 512)
        subprocess.run([*common, f"--run_dir={stopped}", "--checkpoint.every=1000000step", f"--max_steps={half}"],
                       check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        def copy_stopped(stopped=stopped):
            shutil.rmtree(arguments.scratch / "again", ignore_errors=True)
            shutil.copytree(stopped, arguments.scratch / "again")

        jobs = [UntilFirstStep([*common, "--run_dir=again", "--resume=auto"], re.compile(rf"step {half + 1}/"),
                               arguments.scratch, copy_stopped),
                UntilFirstStep([*common, "--run_dir=anew", "--overwrite"], FIRST_STEP["ours"], arguments.scratch)]
        results.append(figures_of(f"{IMAGENET:,} images, {name}", by_turns(jobs, arguments.pairs), "seconds"))
    return results


PARTS = {"speed": speed, "bf16": bf16, "saving": saving, "logging": logging, "start": start, "resume": resume}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="*", choices=PARTS, default=["speed", "bf16", "saving", "logging", "resume"])
    parser.add_argument("--model", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--reference")
    parser.add_argument("--folder", type=pathlib.Path)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build")
    parser.add_argument("--python", default=PYTHON)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    arguments.build = arguments.build.resolve()
    arguments.python = shutil.which(arguments.python) and os.path.abspath(shutil.which(arguments.python))
    if not arguments.python:
        sys.exit("bench/train: --python names no program")
    results = {}
    with contextlib.ExitStack() as stack:
        arguments.scratch = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-train-")))
        arguments.folder = (arguments.folder or arguments.scratch).resolve()
        for part in arguments.part:
            results[part] = PARTS[part](arguments)
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
