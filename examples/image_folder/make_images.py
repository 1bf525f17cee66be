#!/usr/bin/env python3
"""Makes a folder of small images to try things with: the handwritten digits in data/digits.csv.gz as PNG files.

    make_images.py OUT

    OUT/train/{zero,one,two}/NNNN.png, OUT/test/…      every fifth image is for testing
"""

import gzip
import pathlib
import struct
import sys
import zlib

CLASSES = ["zero", "one", "two"]
SCALE = 4  # the digits have 8 x 8 pixels


def png(rows):
    """Of rows of grey values in [0, 255]."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 0, 0, 0, 0)
    pixels = b"".join(b"\0" + bytes(row) for row in rows)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


def main():
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    out = pathlib.Path(sys.argv[1])
    digits = pathlib.Path(__file__).resolve().parent.parent.parent / "data/digits.csv.gz"
    counts = dict.fromkeys(CLASSES, 0)
    for line in gzip.open(digits, "rt"):
        *values, label = (int(float(value)) for value in line.split(","))
        if label >= len(CLASSES):
            continue
        name = CLASSES[label]
        rows = [[min(255, values[y // SCALE * 8 + x // SCALE] * 16) for x in range(8 * SCALE)] for y in range(8 * SCALE)]
        folder = out / ("test" if counts[name] % 5 == 0 else "train") / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{counts[name]:04}.png").write_bytes(png(rows))
        counts[name] += 1
    print(f"{out}: {sum(counts.values())} images of {', '.join(CLASSES)}")


if __name__ == "__main__":
    main()
