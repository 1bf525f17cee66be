#!/usr/bin/env python3
"""Makes images for segmentation, detection and a GAN from the stamps of Tux Paint.

The stamps (Debian's package tuxpaint-stamps-default, GPL-2, 161 MB) are drawings and photos with
transparent backgrounds. They are pasted on backgrounds of random colours, image by image other
stamps in other sizes, places and light, so the masks and boxes are exact. There is one class.

    OUT/scenes/{train,val}/{images,masks}/NNNN.png, OUT/scenes/{train,val}.json
    OUT/gan/all/NNNN.png
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

try:
    import numpy
    from PIL import Image
except ImportError as missing:
    sys.exit(f"make_data.py: {missing}; scripts/setup --python installs it for "
             ".venv/bin/python3")

PACKAGE = "tuxpaint-stamps-default"
INSTALLED = pathlib.Path("/usr/share/tuxpaint/stamps")
FOLDERS = ["animals", "food", "household", "plants", "vehicles"]  # of the package
SPLITS = {"train": 320, "val": 80}
SIZE = 64
SEED = 7


def stamps_folder(work):
    """The installed stamps, or those of the package, unpacked in a folder `work`."""
    if INSTALLED.is_dir():
        return INSTALLED
    try:
        subprocess.run(["apt-get", "download", PACKAGE], cwd=work, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"cannot download {PACKAGE} ({error}); give the folder of stamps with --stamps")
    package = next(work.glob(f"{PACKAGE}_*.deb"))
    subprocess.run(["dpkg", "-x", package, work], check=True)
    return work / INSTALLED.relative_to("/")


def read_stamps(folder):
    """RGBA images without their transparent margins, at most 128 pixels wide or high."""
    stamps = []
    for name in FOLDERS:
        for path in sorted((folder / name).rglob("*.png")):
            try:
                stamp = Image.open(path).convert("RGBA")
            except OSError as error:
                sys.exit(f"cannot read the stamp {path}: {error}")
            stamp = stamp.crop(stamp.getchannel("A").getbbox())
            stamp.thumbnail((128, 128), Image.Resampling.LANCZOS)
            stamps.append(stamp)
    if not stamps:
        sys.exit(f"no PNG files in {', '.join(FOLDERS)} of {folder}; --stamps is the folder of "
                 f"{PACKAGE}'s stamps")
    return stamps


def background(random):
    """Clouds of two colours."""
    clouds = Image.fromarray(random.integers(0, 256, (4, 4), numpy.uint8))
    clouds = clouds.resize((SIZE, SIZE), Image.Resampling.BICUBIC)
    first, second = (tuple(int(value) for value in random.integers(0, 256, 3)) for _ in range(2))
    return Image.composite(Image.new("RGB", (SIZE, SIZE), first),
                           Image.new("RGB", (SIZE, SIZE), second), clouds)


def scene(stamps, random):
    """An image with one to three stamps, and for each the mask of the pixels that show it."""
    image = background(random)
    masks = []
    for _ in range(random.integers(1, 4)):
        stamp = stamps[random.integers(len(stamps))]
        longer = random.uniform(0.35, 0.7) * SIZE
        scale = longer / max(stamp.size)
        stamp = stamp.resize([max(round(scale * side), 4) for side in stamp.size],
                             Image.Resampling.LANCZOS)
        corner = [int(random.integers(SIZE - side + 1)) for side in stamp.size]
        image.paste(stamp, corner, stamp)
        mask = numpy.zeros((SIZE, SIZE), bool)
        mask[corner[1]:corner[1] + stamp.height, corner[0]:corner[0] + stamp.width] = (
            numpy.asarray(stamp.getchannel("A")) > 127)
        masks = [former & ~mask for former in masks] + [mask]
    light = random.uniform(0.5, 1.2)
    pixels = numpy.clip(numpy.asarray(image) * light, 0, 255).astype(numpy.uint8)
    return Image.fromarray(pixels), [mask for mask in masks if mask.sum() > 30]


def covered(masks):
    """A picture with 1 where a stamp is."""
    pixels = numpy.zeros((SIZE, SIZE), numpy.uint8)
    for mask in masks:
        pixels[mask] = 1
    return Image.fromarray(pixels)


def annotation(number, image, mask):
    rows, columns = numpy.nonzero(mask)
    x, y = int(columns.min()), int(rows.min())
    width, height = int(columns.max()) + 1 - x, int(rows.max()) + 1 - y
    return {"id": number, "image_id": image, "category_id": 1, "iscrowd": 0,
            "area": int(mask.sum()), "bbox": [x, y, width, height]}


def make_scenes(stamps, out):
    """The images of segmentation and detection, with masks and boxes."""
    random = numpy.random.default_rng(SEED)
    for split, count in SPLITS.items():
        folder = out / "scenes" / split
        for kind in ["images", "masks"]:
            (folder / kind).mkdir(parents=True, exist_ok=True)
        images, annotations = [], []
        for number in range(count):
            image, masks = scene(stamps, random)
            name = f"{number:04}.png"
            image.save(folder / "images" / name)
            covered(masks).save(folder / "masks" / name)
            images.append({"id": number, "file_name": name, "width": SIZE, "height": SIZE})
            annotations += [annotation(len(annotations) + index, number, mask)
                            for index, mask in enumerate(masks)]
        text = json.dumps({"images": images, "annotations": annotations,
                           "categories": [{"id": 1, "name": "stamp"}]})
        (out / "scenes" / f"{split}.json").write_text(text)


def make_single(stamps, out):
    """Each stamp on white."""
    folder = out / "gan" / "all"
    folder.mkdir(parents=True, exist_ok=True)
    for number, stamp in enumerate(stamps):
        image = Image.new("RGB", (SIZE, SIZE), "white")
        stamp = stamp.copy()
        stamp.thumbnail((SIZE - 4, SIZE - 4), Image.Resampling.LANCZOS)
        image.paste(stamp, [(SIZE - side) // 2 for side in stamp.size], stamp)
        image.save(folder / f"{number:04}.png")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="OUT", type=pathlib.Path)
    parser.add_argument("--stamps", metavar="FOLDER", type=pathlib.Path,
                        help=f"by default {INSTALLED}, or the package from Debian's mirror")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        stamps = read_stamps(arguments.stamps or stamps_folder(pathlib.Path(work)))
    try:
        make_scenes(stamps, arguments.out)
        make_single(stamps, arguments.out)
    except OSError as error:
        sys.exit(f"cannot write the images: {error}; choose another OUT")
    print(f"{arguments.out}: {sum(SPLITS.values())} scenes, {len(stamps)} stamps")


if __name__ == "__main__":
    main()
