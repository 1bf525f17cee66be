#!/usr/bin/env python3
"""Makes a folder of small images to try things with: the handwritten digits in data/digits.csv.gz as PNG files.

    make_images.py OUT             for classification, and for a GAN
    make_images.py OUT --scenes    for segmentation and detection

    OUT/train/{zero,one,two}/NNNN.png, OUT/test/…      every fifth image is for testing

    OUT/{train,val,test}/images/NNNN.png               several digits on a lighter or darker ground
    OUT/{train,val,test}/masks/NNNN.png                0 is the ground, 1 to 3 the digits zero to two
    OUT/{train,val,test}.json                          boxes around the digits, as COCO writes them
"""

import gzip
import json
import pathlib
import random
import struct
import sys
import zlib

CLASSES = ["zero", "one", "two"]
SCALE = 4  # the digits have 8 x 8 pixels
SCENES = {"train": 120, "val": 20, "test": 20}


def png(rows):
    """Of rows of grey values in [0, 255]."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 0, 0, 0, 0)
    pixels = b"".join(b"\0" + bytes(row) for row in rows)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


def read_digits():
    """Pairs of a class and its values, in [0, 16]."""
    digits = pathlib.Path(__file__).resolve().parent.parent.parent / "data/digits.csv.gz"
    for line in gzip.open(digits, "rt"):
        *values, label = (int(float(value)) for value in line.split(","))
        if label < len(CLASSES):
            yield label, values


def write(file, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(png(rows))


def make_images(out):
    counts = dict.fromkeys(CLASSES, 0)
    for label, values in read_digits():
        name = CLASSES[label]
        rows = [[min(255, values[y // SCALE * 8 + x // SCALE] * 16) for x in range(8 * SCALE)] for y in range(8 * SCALE)]
        write(out / ("test" if counts[name] % 5 == 0 else "train") / name / f"{counts[name]:04}.png", rows)
        counts[name] += 1
    print(f"{out}: {sum(counts.values())} images of {', '.join(CLASSES)}")


def scene(digits, draw):
    """Rows of an image, of its mask, and a box (x, y, width, height) with its label for each digit."""
    side = 8 * SCALE
    ground = draw.randrange(0, 100)
    image = [[ground + draw.randrange(20) for _ in range(2 * side)] for _ in range(2 * side)]
    mask = [[0] * (2 * side) for _ in range(2 * side)]
    boxes = []
    # One digit per quarter of the image, so that none covers another.
    for quarter in draw.sample(range(4), draw.randrange(1, 4)):
        label, values = draw.choice(digits)
        scale = draw.randrange(SCALE - 1, SCALE + 1)
        left, top = (corner * side + draw.randrange(8 * (SCALE - scale) + 1) for corner in (quarter % 2, quarter // 2))
        inked = []
        for y in range(8 * scale):
            for x in range(8 * scale):
                value = values[y // scale * 8 + x // scale]
                if value < 5:
                    continue
                image[top + y][left + x] = min(255, ground + 9 * value + draw.randrange(12))
                mask[top + y][left + x] = 1 + label
                inked.append((left + x, top + y))
        columns, rows = zip(*inked)
        boxes.append((label, (min(columns), min(rows), max(columns) + 1 - min(columns), max(rows) + 1 - min(rows)), len(inked)))
    return image, mask, boxes


def make_scenes(out):
    draw = random.Random(0)
    digits = list(read_digits())
    for split, count in SCENES.items():
        images, annotations = [], []
        for i in range(count):
            image, mask, boxes = scene(digits, draw)
            name = f"{i:04}.png"
            write(out / split / "images" / name, image)
            write(out / split / "masks" / name, mask)
            images.append({"id": i, "file_name": name, "width": len(image[0]), "height": len(image)})
            for label, box, area in boxes:
                annotations.append({"id": len(annotations) + 1, "image_id": i, "category_id": 1 + label, "iscrowd": 0,
                                    "bbox": box, "area": area})
        categories = [{"id": 1 + label, "name": name} for label, name in enumerate(CLASSES)]
        (out / f"{split}.json").write_text(json.dumps({"images": images, "annotations": annotations,
                                                       "categories": categories}))
    print(f"{out}: {sum(SCENES.values())} scenes with {', '.join(CLASSES)}")


def main():
    arguments = [argument for argument in sys.argv[1:] if argument != "--scenes"]
    if len(arguments) != 1 or arguments[0].startswith("-"):
        sys.exit(__doc__)
    (make_scenes if "--scenes" in sys.argv else make_images)(pathlib.Path(arguments[0]))


if __name__ == "__main__":
    main()
