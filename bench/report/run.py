#!/usr/bin/env python3
"""Times the commands with which a user looks at runs: medians of the repetitions, with the shortest and the longest.

  bench/report/run.py [--part help|report|compare ...] [--repeat 9] [--build build] [--steps 100000] [--pictures 1000]

help: `train --help`, from its start to its end.
report: `train report` of a run of --steps logged steps and --pictures pictures; and from the navigation until Chromium has
drawn that page, by its own clock.
compare: `train compare --html` of 100 runs of 1,800 logged steps, 20 configurations with 5 seeds each.
Figures count on an idle machine only: the load is printed.
"""

import argparse
import json
import math
import os
import pathlib
import random
import re
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import zlib

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SIDE = 256  # width and height of a picture, in pixels
AFTER_DRAWING = """<script>
addEventListener("load", () => requestAnimationFrame(() => setTimeout(() =>
    console.log("drawn after", performance.now(), "ms, charts:", document.querySelectorAll("canvas").length))));
</script></body>"""


def seconds_of(command):
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - begin
    if done.returncode != 0:
        sys.exit(f"bench/report: {' '.join(map(str, command))} exited with {done.returncode}:\n{done.stderr}")
    return seconds


def show(name, seconds, more=""):
    print(f"{name:46}{statistics.median(seconds):8.3f} s  ({min(seconds):.3f} to {max(seconds):.3f}){more}", flush=True)


def noise_png(seed):
    """A PNG of noise, which does not compress."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    values = random.Random(seed)
    rows = b"".join(b"\0" + values.randbytes(3 * SIDE) for _ in range(SIDE))
    header = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 1)) + chunk(b"IEND", b"")


def make_run(folder, steps, steps_per_epoch, lr=0.1, seed=0, start=0):
    """Makes a run folder as `train` does, with a made-up log."""
    folder.mkdir(parents=True)
    folder.joinpath("config.yaml").write_text(
        f"seed: {seed}\nepochs: {steps // steps_per_epoch}\nbatch_size: 8\nmodel: {{type: digits}}\n"
        f"task: {{type: classification}}\ndata: {{type: digits}}\noptimizer: {{type: sgd, lr: {lr}}}\n")
    lines = [{"event": "start", "time": 1000 + start, "format_version": 1, "world_size": 2, "step": 0}]
    noise = random.Random(seed)
    for step in range(1, steps + 1):
        epoch = 1 + (step - 1) // steps_per_epoch
        loss = 2 / math.sqrt(step) * (1 + 0.1 * noise.random())
        lines.append({"event": "step", "time": 1000 + step, "epoch": epoch, "step": step, "loss": loss, "lr": lr,
                      "data_wait_seconds": 1e-5})
        if step % steps_per_epoch == 0:
            lines.append({"event": "epoch", "time": 1000 + step, "epoch": epoch, "step": step, "lr": lr,
                          "train_loss": loss, "train_accuracy": 1 - loss / 3, "test_loss": 1.1 * loss,
                          "test_accuracy": 0.99 - loss / 3, "images_per_second": 5000 + 100 * noise.random(),
                          "data_wait_share": 0.01, "seconds": 0.01 * step})
    with open(folder / "log.jsonl", "w", encoding="utf-8") as log:
        log.writelines(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)  # without spaces: `train` searches for "event":"step"
    result = {"best_test_accuracy": lines[-1]["test_accuracy"], "best_mode": "max", "best_epoch": lines[-1]["epoch"],
              "test_accuracy": lines[-1]["test_accuracy"], "train_loss": lines[-1]["train_loss"],
              "epochs": steps // steps_per_epoch, "seconds": 0.01 * steps, "world_size": 2}
    folder.joinpath("result.json").write_text(json.dumps(result))


def help_text(arguments, _):
    show("train --help", [seconds_of([arguments.train, "--help"]) for _ in range(arguments.repeat)])


def report(arguments, scratch):
    run = scratch / "long"
    make_run(run, arguments.steps, 200)
    run.joinpath("pictures").mkdir()
    for i in range(arguments.pictures):
        name = ("samples", "worst_samples")[i % 2]
        (run / "pictures" / f"{name}-{i * arguments.steps // arguments.pictures:012}.png").write_bytes(noise_png(i))
    what = f"{arguments.steps:,} steps, {arguments.pictures:,} pictures"
    written = [seconds_of([arguments.train, "report", run]) for _ in range(arguments.repeat)]
    page = (run / "report.html").read_text(encoding="utf-8")
    show(f"report of {what}", written, f", {len(page) / 1e6:.2f} MB")
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        print("opened in Chromium: not timed, there is none")
        return
    end = page.rindex("</body>")
    run.joinpath("report.html").write_text(page[:end] + AFTER_DRAWING + page[end + len("</body>"):], encoding="utf-8")
    opened = []
    for _ in range(arguments.repeat):
        done = subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             "--disable-background-networking", f"--user-data-dir={scratch / 'profile'}", "--window-size=1240,1000",
             "--enable-logging=stderr", f"--screenshot={scratch / 'page.png'}", f"file://{run / 'report.html'}"],
            capture_output=True, text=True, check=True)
        drawn = re.search(r"drawn after ([\d.]+) ms, charts: (\d+)", done.stderr)
        if drawn is None or int(drawn.group(2)) == 0:
            sys.exit(f"bench/report: the page was not drawn:\n{done.stderr}")
        opened.append(float(drawn.group(1)) / 1000)
    show("opened in Chromium", opened, f", {drawn.group(2)} charts")


def compare(arguments, scratch):
    runs = []
    for i in range(100):
        runs.append(scratch / f"run-{i}")
        make_run(runs[-1], 1800, 20, lr=0.01 * (1 + i // 5), seed=i % 5, start=i)
    show("compare of 100 runs, with a page", [seconds_of([arguments.train, "compare", *runs, "--html",
                                                          scratch / "all.html"]) for _ in range(arguments.repeat)])


PARTS = {"help": help_text, "report": report, "compare": compare}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--pictures", type=int, default=1000)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build")
    arguments = parser.parse_args()
    arguments.train = arguments.build / "bin/train"
    cpu = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} CPUs, {cpu.group(1) if cpu else 'unknown'}, "
          f"load {os.getloadavg()[0]:.1f} when this began")
    with tempfile.TemporaryDirectory(prefix="bench-report-") as scratch:
        for part in arguments.part:
            PARTS[part](arguments, pathlib.Path(scratch))


if __name__ == "__main__":
    main()
