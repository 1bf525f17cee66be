"""Two things timed by turns, which a machine that gets slower and faster hits alike."""

import argparse
import math
import pathlib
import statistics

ROOT = pathlib.Path(__file__).resolve().parent.parent


def parse_arguments(description, pairs, add=lambda parser: None):
    """--pairs, --build, --python and what `add` adds."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=pairs)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build")
    parser.add_argument("--python", default="python3")
    add(parser)
    return parser.parse_args()


def processor_times():
    """The kernel's counters since it started: user, nice, system, idle, iowait, irq, softirq, steal."""
    return [int(word) for word in pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]


def stolen_share(before, after):
    """Of the processors' time between two processor_times(): what the host gave to other virtual machines."""
    spent = [end - begin for begin, end in zip(before, after)]
    return spent[7] / max(1, sum(spent))


def median_and_interval(values):
    """The interval holds the median with at least 95 %, where there are enough values for that."""
    values = sorted(values)
    count, outside = len(values), 0
    for below in range(count // 2):
        tail = 2 * sum(math.comb(count, k) for k in range(below + 1)) / 2**count
        if tail > 0.05:
            break
        outside = below
    return statistics.median(values), values[outside], values[count - 1 - outside]


def by_turns(jobs, pairs, *words):
    """Answers of ours and of theirs; who is first changes from pair to pair."""
    answers = []
    for pair in range(pairs):
        order = jobs if pair % 2 == 0 else jobs[::-1]
        both = [job.ask(*words) for job in order]
        answers.append(both if pair % 2 == 0 else both[::-1])
    return answers
