"""Times two programs by turns, so that a change in the machine's speed affects both."""

import argparse
import math
import os
import pathlib
import statistics

ROOT = pathlib.Path(__file__).resolve().parent.parent
VENV_PYTHON = ROOT / ".venv/bin/python3"
PYTHON = os.environ.get("SYNCBN_TEST_PYTHON", str(VENV_PYTHON) if VENV_PYTHON.exists() else "python3")


def parse_arguments(description, pairs, add=lambda parser: None):
    """Parses --pairs, --build, --python and the options that `add` adds."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=pairs)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build")
    parser.add_argument("--python", default=PYTHON)
    add(parser)
    return parser.parse_args()


def processor_times():
    """The kernel's counters since it started: user, nice, system, idle, iowait, irq, softirq, steal."""
    return [int(word) for word in pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]


def stolen_share(before, after):
    """Share of the processors' time between two processor_times() that the host gave to other virtual machines."""
    spent = [end - begin for begin, end in zip(before, after)]
    return spent[7] / max(1, sum(spent))


def median_and_interval(values):
    """The median, and an interval of order statistics that holds it with at least 95 %, given six values or more."""
    values = sorted(values)
    count, outside = len(values), 0
    for below in range(count // 2):
        tail = 2 * sum(math.comb(count, k) for k in range(below + 1)) / 2**count
        if tail > 0.05:
            break
        outside = below
    return statistics.median(values), values[outside], values[count - 1 - outside]


def by_turns(jobs, pairs, *words):
    """Pairs of the two jobs' answers. The job that is asked first changes from pair to pair."""
    answers = []
    for pair in range(pairs):
        order = jobs if pair % 2 == 0 else jobs[::-1]
        both = [job.ask(*words) for job in order]
        answers.append(both if pair % 2 == 0 else both[::-1])
    return answers
