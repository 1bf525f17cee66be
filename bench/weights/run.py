#!/usr/bin/env python3
"""Times reading a ResNet-50's weights (a .pth of 102 MB) beside torch.load(mmap=True).

  bench/weights/run.py [--pairs 15] [--build build] [--python PYTHON]

One thread each, by turns, the file in the cache. "read" ends when there are tensors: Python has not looked at their
values then, and ours has verified the checksums. "load" ends when a network has the values. The ratio is our time
over Python's, pair by pair, with an interval that holds its median with 95 % or more. The Python needs torchvision.
"""

import pathlib
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from pairs import by_turns, median_and_interval, parse_arguments  # noqa: E402
from ranks import Job  # noqa: E402

TARGET = 1.2


def main():
    arguments = parse_arguments(__doc__, pairs=15)
    with tempfile.TemporaryDirectory() as folder:
        file = str(pathlib.Path(folder, "resnet50.pth"))
        theirs = Job([arguments.python, str(HERE / "weights_read.py"), file], ranks=1)
        theirs.ask("load")  # now the file exists
        ours = Job([str(arguments.build / "bench/weights_read"), file], ranks=1)
        for work in ("read", "load"):
            by_turns([ours, theirs], 2, work)
            pairs = by_turns([ours, theirs], arguments.pairs, work)
            ratio, low, high = median_and_interval([own["seconds"] / other["seconds"] for own, other in pairs])
            times = [1000 * sorted(pair[side]["seconds"] for pair in pairs)[len(pairs) // 2] for side in (0, 1)]
            print(f"{work}: {ratio:.2f} of Python's time ({low:.2f} to {high:.2f}), at most {TARGET}: "
                  f"{'met' if ratio <= TARGET else 'MISSED'}; {times[0]:.1f} and {times[1]:.1f} ms")
        for job in (ours, theirs):
            job.end()


if __name__ == "__main__":
    main()
