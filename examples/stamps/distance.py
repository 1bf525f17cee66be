#!/usr/bin/env python3
"""Measures how far the images that GANs make are from real ones.

    distance.py REAL SWEEP.CSV ...

REAL is a folder of PNG files. Writes distances.csv beside each SWEEP.CSV of a sweep: its rows with
a column `distance`, which compares the last picture of each run with REAL: the sliced Wasserstein
distance (Rabin et al., 2011) of patches of 7 x 7 pixels with values from 0 to 1, the mean over
images in full, half and quarter size (as Karras et al., arXiv:1710.10196, do it). 0: no difference.
"""

import csv
import pathlib
import sys

import numpy
from PIL import Image

SIDE = 64  # of an image, in pixels
PATCH = 7
PATCHES = 16  # of an image
DIRECTIONS = 512


def refuse(message):
    print(f"distance.py: {message}", file=sys.stderr)
    sys.exit(2)


def pixels_of(path):
    try:
        return numpy.asarray(Image.open(path).convert("RGB"), numpy.float32) / 255
    except OSError as error:
        refuse(f"cannot read {path}: {error}")


def read_real(folder):
    images = [pixels_of(path) for path in sorted(pathlib.Path(folder).rglob("*.png"))]
    if not images or any(image.shape != (SIDE, SIDE, 3) for image in images):
        refuse(f"{folder} must have PNG files of {SIDE} x {SIDE} pixels, such as make_data.py's "
               "gan/all")
    return numpy.stack(images)


def read_generated(run, count):
    """The first images of the newest picture of a run."""
    pictures = sorted((run / "pictures").glob("samples-*.png"))
    if not pictures:
        refuse(f"{run} has no pictures/samples-*.png; give the sweep.csv of a sweep of a GAN")
    grid = pixels_of(pictures[-1])
    rows, columns = grid.shape[0] // SIDE, grid.shape[1] // SIDE
    images = grid.reshape(rows, SIDE, columns, SIDE, 3).swapaxes(1, 2).reshape(-1, SIDE, SIDE, 3)
    if len(images) < count:
        refuse(f"{pictures[-1]} has {len(images)} images, fewer than the real ones ({count}); "
               "set task.samples")
    return images[:count]


def halved(images):
    count, height, width, channels = images.shape
    return images.reshape(count, height // 2, 2, width // 2, 2, channels).mean((2, 4))


def patches_of(images, random):
    side = images.shape[1] - PATCH + 1
    corners = random.integers(0, side, (len(images), PATCHES, 2))
    return numpy.stack([image[y:y + PATCH, x:x + PATCH].ravel()
                        for image, places in zip(images, corners) for y, x in places])


def distance(real, generated):
    random = numpy.random.default_rng(0)
    distances = []
    for _ in range(3):
        directions = random.normal(size=(3 * PATCH * PATCH, DIRECTIONS))
        directions /= numpy.linalg.norm(directions, axis=0)
        sorted_values = [numpy.sort(patches_of(images, random) @ directions, axis=0)
                         for images in [real, generated]]
        distances.append(numpy.abs(sorted_values[0] - sorted_values[1]).mean())
        real, generated = halved(real), halved(generated)
    return float(numpy.mean(distances))


def main():
    if len(sys.argv) < 3:
        refuse(__doc__.strip())
    real = read_real(sys.argv[1])
    for sweep in map(pathlib.Path, sys.argv[2:]):
        try:
            with open(sweep, newline="") as file:
                runs = list(csv.DictReader(file))
            for run in runs:
                folder = sweep.parent / run["folder"]
                run["distance"] = distance(real, read_generated(folder, len(real)))
            with open(sweep.with_name("distances.csv"), "w", newline="") as file:
                table = csv.DictWriter(file, runs[0].keys())
                table.writeheader()
                table.writerows(runs)
        except (OSError, UnicodeDecodeError, KeyError, IndexError) as error:
            refuse(f"{sweep} is not the table of a sweep: {error!r}")


if __name__ == "__main__":
    main()
