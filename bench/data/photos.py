#!/usr/bin/env python3
"""Makes photographs in ImageNet's sizes from photographs that Python packages ship.

  bench/data/photos.py FOLDER [--count 512] [--seed 0] [--quality 90]

Resizes random parts of the photographs, mirrored or not, to ImageNet's sizes (500 x 375 and the like), and stores them
as JPEG of that quality in FOLDER/0 and FOLDER/1, as torchvision.datasets.ImageFolder expects. The same arguments make
the same files. If no such package is installed, the error message names those that would do.
"""

import argparse
import importlib.util
import pathlib
import random
import sys

from PIL import Image

PHOTOGRAPHS = {
    "sklearn": ["datasets/images/china.jpg", "datasets/images/flower.jpg"],
    "skimage": [f"data/{name}" for name in ("astronaut.png", "chelsea.png", "coffee.png", "motorcycle_left.png",
                                            "rocket.jpg")],
    "matplotlib": ["mpl-data/sample_data/grace_hopper.jpg"],
    "imgaug": ["quokka.jpg"],
    "ultralytics": ["assets/bus.jpg", "assets/zidane.jpg"],
}
# Width, height and their share.
SIZES = {(500, 375): 50, (375, 500): 20, (500, 333): 15, (333, 500): 5, (640, 480): 5, (400, 300): 5}
SMALLEST_PART = 0.7  # lower bound on a part's share of the largest possible side


def shipped():
    found = []
    for package, files in PHOTOGRAPHS.items():
        spec = importlib.util.find_spec(package)
        if spec is not None:
            folder = pathlib.Path(spec.origin).parent
            found += [folder / file for file in files if (folder / file).exists()]
    if not found:
        sys.exit("bench/data: no package with photographs is installed; scikit-learn has two, more are in "
                 "scikit-image, matplotlib, imgaug and ultralytics (pip install --no-deps is enough)")
    return [Image.open(file).convert("RGB") for file in found]


def part_of(photograph, shape, chance):
    """A part of this shape: the largest possible one, scaled by a random share."""
    scale = min(photograph.width / shape[0], photograph.height / shape[1]) * chance.uniform(SMALLEST_PART, 1)
    width, height = (round(side * scale) for side in shape)
    left = chance.randint(0, photograph.width - width)
    top = chance.randint(0, photograph.height - height)
    return photograph.resize(shape, Image.Resampling.LANCZOS, (left, top, left + width, top + height))


def make(folder, count, seed, quality):
    """Writes the files. Returns their mean size in bytes."""
    photographs = shipped()
    chance = random.Random(seed)
    for label in "01":
        (pathlib.Path(folder) / label).mkdir(parents=True, exist_ok=True)
    total = 0
    for number in range(count):
        shape = chance.choices(list(SIZES), SIZES.values())[0]
        image = part_of(photographs[number % len(photographs)], shape, chance)
        if chance.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        path = pathlib.Path(folder) / str(number % 2) / f"{number:05}.jpg"
        image.save(path, quality=quality)
        total += path.stat().st_size
    return total / count


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--count", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quality", type=int, default=90)
    arguments = parser.parse_args()
    mean = make(arguments.folder, arguments.count, arguments.seed, arguments.quality)
    print(f"{arguments.count} files of {mean / 1000:.0f} kB on average")


if __name__ == "__main__":
    main()
