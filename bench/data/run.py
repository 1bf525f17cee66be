#!/usr/bin/env python3
"""Times loading beside torch's DataLoader with torchvision: the same photographs, by turns.

  bench/data/run.py [--part throughput|start|training|shards|index ...] [--pairs 9] [--folder DIR] [--count 512]
                    [--batch 64] [--build build] [--python PYTHON] [--json FILE]

throughput: decode, RandomResizedCrop(224) and flip into batches of uint8, with one worker and with two; images a
second, processor time of an image in ms (of all threads and processes), and the ratio of images a second, ours /
theirs, pair by pair with an interval that holds the median with 95 % or more. "pillow" is ImageFolder by Pillow with
PILToTensor, "decode_jpeg" torchvision.io.read_file and decode_jpeg with the transforms on tensors; both keep their
workers from epoch to epoch. start: from construction to the first batch, and from an epoch's last batch to the next
one's first, four workers, DataLoader's defaults; the ratio is theirs / ours. training: the wait for data in a run of
`train` with ResNet-50. shards: tar files with members of 1 MiB, of which few bytes need decoding, through the loader
beside a plain sequential read, GB/s and their ratio. index: the output of bench/index_memory, if it was built. If
--folder does not exist, photos.py makes the photographs there. The Python needs torchvision.
"""

import argparse
import io
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tarfile
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from pairs import PYTHON, ROOT, by_turns, median_and_interval

SAME_MEAN = 4  # upper bound on the difference of means of values from 0 to 255: crops are random
TRAINING = {"batch": 8, "images": 48}
SHARDS, MEMBERS, MEMBER_BYTES = 4, 64, 1 << 20
SMALL_JPEG = "import sys; from PIL import Image; Image.open(sys.argv[1]).resize((8, 8)).save(sys.stdout.buffer, 'jpeg')"


class Job:
    """One side: a process that executes commands from its standard input."""

    def __init__(self, command, batch, workers):
        environment = dict(os.environ, OMP_NUM_THREADS="1")
        self.process = subprocess.Popen([*command, str(batch), str(workers)], env=environment, text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, word):
        before = self.processor_seconds()
        print(word, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            sys.exit(f"bench/data: {' '.join(self.process.args)} has ended")
        return {**json.loads(answer), "processor": self.processor_seconds() - before}

    def processor_seconds(self):
        """Processor time of the process and its descendants, including ended ones."""
        ticks, pids = 0, [self.process.pid]
        for pid in pids:
            fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            ticks += sum(map(int, fields[11:15]))
            for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
                pids += map(int, (task / "children").read_text().split())
        return ticks / os.sysconf("SC_CLK_TCK")

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def jobs_of(arguments, decoder, workers):
    return [Job([arguments.build / "bench/data_loading", arguments.folder], arguments.batch, workers),
            Job([arguments.python, str(HERE / "loading.py"), decoder, arguments.folder], arguments.batch, workers)]


def throughput(arguments):
    print(f"{'':26}{'ours':>10}{'Python':>10}{'ratio':>15}  interval      ms of processor an image")
    results = []
    for decoder in ("pillow", "decode_jpeg"):
        for workers in (1, 2):
            jobs = jobs_of(arguments, decoder, workers)
            means = [job.ask("look")["mean"] for job in jobs]
            if abs(means[0] - means[1]) > SAME_MEAN:
                sys.exit(f"bench/data: not the same images: their means are {means}")
            pairs = by_turns(jobs, arguments.pairs, "epoch")
            rates = [[answer["images"] / answer["seconds"] for answer in pair] for pair in pairs]
            middle, low, high = median_and_interval([ours / theirs for ours, theirs in rates])
            cost = [1000 * statistics.median(pair[side]["processor"] / pair[side]["images"] for pair in pairs)
                    for side in (0, 1)]
            rate = [statistics.median(side) for side in zip(*rates)]
            results.append({"throughput": decoder, "workers": workers, "images_per_second": rate, "ratio": middle,
                            "interval": [low, high], "processor_ms": cost})
            print(f"{decoder:16}{workers} worker{' s'[workers > 1]} {rate[0]:10.0f}{rate[1]:10.0f} images/s{middle:6.2f}"
                  f"  {low:.2f} to {high:.2f}  {cost[0]:.2f} {cost[1]:.2f}", flush=True)
            for job in jobs:
                job.end()
    return results


def start(arguments):
    results = []
    jobs = jobs_of(arguments, "pillow", 4)
    for word in ("first", "turn"):
        pairs = by_turns(jobs, arguments.pairs, word)
        middle, low, high = median_and_interval([theirs["seconds"] / ours["seconds"] for ours, theirs in pairs])
        times = [1000 * statistics.median(pair[side]["seconds"] for pair in pairs) for side in (0, 1)]
        results.append({"start": word, "ms": times, "ratio": middle, "interval": [low, high]})
        print(f"{word:26}{times[0]:10.1f}{times[1]:10.1f} ms      {middle:6.1f}  {low:.1f} to {high:.1f}", flush=True)
    for job in jobs:
        job.end()
    return results


def training(arguments):
    """The wait for data of an epoch, including its first step, as `train` reports it."""
    with tempfile.TemporaryDirectory() as folder:
        for label in "01":
            part = pathlib.Path(folder) / "photos" / label
            part.mkdir(parents=True)
            for file in sorted((pathlib.Path(arguments.folder) / label).iterdir())[:TRAINING["images"] // 2]:
                (part / file.name).symlink_to(file.resolve())
        path = pathlib.Path(folder) / "photos"
        config = pathlib.Path(folder) / "resnet50.yaml"
        config.write_text(f"epochs: 1\nbatch_size: {TRAINING['batch']}\nmodel: resnet50\n"
                          f"data:\n  type: image_folder\n  train: {path}\n  test: {path}\n"
                          "  transforms: [{type: random_resized_crop, size: 224}, random_horizontal_flip]\n"
                          "  test_transforms: [{type: resize, size: 256}, {type: center_crop, size: 224}]\n"
                          "optimizer: {type: sgd, lr: 0.01}\n")
        subprocess.run([arguments.build / "bin/train", "--config", config, "--run_dir", f"{folder}/run"], check=True,
                       stderr=subprocess.DEVNULL)
        lines = map(json.loads, (pathlib.Path(folder) / "run/log.jsonl").read_text().splitlines())
        epoch = next(line for line in lines if line["event"] == "epoch")
    print(f"{'training ResNet-50':26}data wait {100 * epoch['data_wait_share']:.2f} % of a step, "
          f"{1000 * epoch['data_wait_seconds']:.1f} ms; {epoch['images_per_second']:.1f} images/s", flush=True)
    return [{"training": "resnet50", "wait": epoch["data_wait_share"]}]


def shards(arguments):
    image = next((pathlib.Path(arguments.folder) / "0").iterdir())
    with tempfile.TemporaryDirectory() as folder:
        files = [f"{folder}/{number}.tar" for number in range(SHARDS)]
        # Decoders ignore bytes after the end of a JPEG, but the loader reads them.
        small = subprocess.run([arguments.python, "-c", SMALL_JPEG, image], check=True, stdout=subprocess.PIPE).stdout
        for file in files:
            with tarfile.open(file, "w", format=tarfile.USTAR_FORMAT) as shard:
                for number in range(MEMBERS):
                    add_member(shard, f"{number}.cls", b"0")
                    add_member(shard, f"{number}.jpg", small.ljust(MEMBER_BYTES, b"\0"))
        output = subprocess.run([arguments.build / "bench/data_shards", f"{folder}/{{0..{SHARDS - 1}}}.tar",
                                 str(arguments.pairs), *files], check=True, stdout=subprocess.PIPE, text=True).stdout
    pairs = [json.loads(line) for line in output.splitlines()]
    middle, low, high = median_and_interval([loader / plain for loader, plain in pairs])
    speeds = [statistics.median(side) / 1e9 for side in zip(*pairs)]
    print(f"{'shards, loader, plain read':26}{speeds[0]:10.2f}{speeds[1]:10.2f} GB/s    {middle:6.2f}"
          f"  {low:.2f} to {high:.2f}", flush=True)
    return [{"shards": "sequential", "gb_per_s": speeds, "ratio": middle, "interval": [low, high]}]


def add_member(shard, name, content):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    shard.addfile(member, io.BytesIO(content))


def index(arguments):
    program = arguments.build / "bench/index_memory"
    if not program.exists():
        print("index: bench/index_memory was not built")
        return []
    output = subprocess.run([program], check=True, stdout=subprocess.PIPE, text=True).stdout
    print(output, end="", flush=True)
    return [{"index": output.splitlines()}]


PARTS = {"throughput": throughput, "start": start, "training": training, "shards": shards, "index": index}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--folder", default=str(ROOT / "build/bench/photos"))
    parser.add_argument("--count", type=int, default=512)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build")
    parser.add_argument("--python", default=PYTHON)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    if not pathlib.Path(arguments.folder).exists():
        subprocess.run([arguments.python, HERE / "photos.py", arguments.folder, "--count", str(arguments.count)],
                       check=True)
    results = []
    # Keeps the indexes of the measured files out of the user's cache.
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        for part in arguments.part:
            results += PARTS[part](arguments)
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
