#!/usr/bin/env python3
"""Runs the commands of a tutorial ("$ …" in its code blocks) in their order, as a reader would.

  tests/examples/tutorial_test.py BUILD_FOLDER [PAGE]      of docs/PAGE.md, by default docs/tutorial.md

A block that begins with "# NAME.yaml" or "# NAME.py" is that file. If the page shows a line of output for a command,
the command has to print a line with the same words; numbers may differ.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # as in tests/discover_suites.cmake: the same on a machine with GPUs
ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def blocks(text):
    """The indented blocks, without their indentation."""
    for match in re.finditer(r"(?:^    .*\n|^\n(?=    ))+", text, re.MULTILINE):
        lines = [line[4:] for line in match.group().splitlines()]
        while lines and not lines[0]:
            lines.pop(0)
        yield lines


def pattern(line):
    """A line of the page as a regular expression that matches any number, any host, and anything for …."""
    words = re.escape(line.replace("[box:0] ", "").strip())
    text = re.sub(r"\d+(\\\.\d+)*", r"[0-9.]+", words.replace("…", ".*").replace(r"\ ", " "))
    text = re.sub(r"\[0-9\.\]\+ (us|ms|s)\b", lambda _: r"[0-9.]+ (us|ms|s|min.*|h.*)", text)
    return text.replace(" ", r"\s+")


def check_photos(folder, build, python):
    """classify.py and `train predict` give the same for images that are not square."""
    make = """
import pathlib, sys
from PIL import Image
pathlib.Path("odd").mkdir()
for i, file in enumerate(sorted(pathlib.Path("photos/test").rglob("*.png"))[::24]):
    side = 30 + 21 * i
    Image.open(file).convert("RGB").resize((side, 90), Image.BICUBIC).save(f"odd/{i}.png")
"""
    subprocess.run([python, "-c", make], cwd=folder, check=True)
    subprocess.run([build / "bin/train", "predict", "odd", "runs/mine", "--output", "odd-answers"], cwd=folder,
                   check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    rows = (folder / "odd-answers/predictions.csv").read_text().splitlines()[1:]
    for name, answer, _ in (row.split(",") for row in rows):
        seen = subprocess.run([python, "classify.py", f"odd/{name}"], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()
        if seen != answer:
            sys.exit(f"classify.py says {seen} of odd/{name}, and train predict {answer}")
    if len(rows) < 5:
        sys.exit(f"only {len(rows)} odd images")


def check_report(folder, page):
    """The run's page has the pictures that the tutorial mentions."""
    report = (folder / "runs/mine/report.html").read_text()
    wanted = {"tutorial": ["first_batch"], "tutorial_gan": ["samples"]}.get(page, ["samples", "worst_samples"])
    for name in wanted:
        if f'"{name}":[{{' not in report:
            sys.exit(f"runs/mine/report.html has no pictures {name}")


def main():
    build = pathlib.Path(sys.argv[1]).resolve()
    page = sys.argv[2] if len(sys.argv) > 2 else "tutorial"
    python = os.environ.get("SYNCBN_TEST_PYTHON", str(ROOT / ".venv/bin/python3"))
    if subprocess.run([python, "-c", "import onnxruntime"], capture_output=True).returncode != 0:
        # In the format of tests/support/test_main.cpp.
        if report := os.environ.get("SYNCBN_TEST_REPORT"):
            with open(report, "a") as file:
                file.write(f"skipped\tExamples.{page}.Commands\tneeds: python-torch\n")
        sys.exit(77)
    ran = 0
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for link, target in {"build": build, "configs": ROOT / "configs", "examples": ROOT / "examples"}.items():
            (folder / link).symlink_to(target)
        for lines in blocks((ROOT / f"docs/{page}.md").read_text()):
            if re.fullmatch(r"# \w+\.(yaml|py)", lines[0]):
                end = next((i for i, line in enumerate(lines) if line.startswith("$ ")), len(lines))
                (folder / lines[0][2:]).write_text("\n".join(lines[:end]) + "\n")
                lines = lines[end:]
            output = ""
            for line in lines:
                if line.startswith("$ "):
                    command = line[2:].replace(".venv/bin/python3", python)
                    print(line, flush=True)
                    done = subprocess.run(["bash", "-c", command], cwd=folder, text=True, stdout=subprocess.PIPE,
                                          stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"})
                    output = done.stdout
                    ran += 1
                    if done.returncode != 0:
                        sys.exit(f"exit code {done.returncode}:\n{output}")
                elif output and line and not re.search(pattern(line), output):
                    sys.exit(f"not said: {line}\n{output}")
        check_report(folder, page)
        if page == "tutorial":
            check_photos(folder, build, python)
    if ran < 5:
        sys.exit(f"only {ran} commands were found")


if __name__ == "__main__":
    main()
