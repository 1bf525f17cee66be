#!/usr/bin/env python3
"""Times average precision beside pycocotools: 5,000 images with 100 detections each, 80 classes.

  bench/detection/run.py [--pairs 5] [--build build] [--python PYTHON]

Matching and accumulation, one thread each, by turns; the ratio is how many times faster ours is, pair by pair,
with an interval that holds its median with 95 % or more where there are enough pairs. Both must find the same
mean average precision. The Python needs pycocotools.
"""

import pathlib
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from pairs import by_turns, median_and_interval, parse_arguments  # noqa: E402
from ranks import Job  # noqa: E402

TARGET = 5


def main():
    arguments = parse_arguments(__doc__, pairs=5)
    with tempfile.TemporaryDirectory() as folder:
        file = str(pathlib.Path(folder, "images.json"))
        ours = Job([str(arguments.build / "bench/average_precision_time"), file], ranks=1)
        ours.ask("measure")  # now the file exists
        theirs = Job([arguments.python, str(HERE / "pycocotools_time.py"), file], ranks=1)
        pairs = by_turns([ours, theirs], arguments.pairs, "measure")
        for job in (ours, theirs):
            job.end()
    for own, other in pairs:
        if abs(own["map"] - other["map"]) > 1e-12:
            sys.exit(f"bench/detection: mean average precision {own['map']} is not pycocotools' {other['map']}")
    ratio, low, high = median_and_interval([other["seconds"] / own["seconds"] for own, other in pairs])
    seconds = [sorted(pair[side]["seconds"] for pair in pairs)[len(pairs) // 2] for side in (0, 1)]
    print(f"average precision: {ratio:.1f} times as fast as pycocotools ({low:.1f} to {high:.1f}), at least {TARGET}: "
          f"{'met' if ratio >= TARGET else 'MISSED'}; {seconds[0]:.2f} and {seconds[1]:.1f} s")


if __name__ == "__main__":
    main()
