#!/usr/bin/env python3
"""Makes the image files for tests, and images.txt with Pillow's result for each.

    python3 tests/data/make_images.py      needs numpy and Pillow (12.2 for the files in git)

A line of images.txt: file, width, height and FNV-1a of the pixels of convert("RGB"), then the same for
the image in its EXIF orientation. A line of operations.txt: an operation and its arguments, then width,
height and FNV-1a of Pillow's result for jpeg_420.jpg (grey_ and mask_: for jpeg_grey.jpg).
"""
import io
import pathlib
import struct
import warnings
import zlib

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

FOLDER = pathlib.Path(__file__).parent / "images"
ADAM7 = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]


def picture(width, height, channels=3):
    """An image with gradients, edges and noise, so that subsampling and filters change it."""
    y, x = np.mgrid[0:height, 0:width]
    planes = []
    for c in range(channels):
        plane = 128 + 90 * np.sin(x / (3 + c) + c) + 40 * np.cos(y / (4 - 0.5 * c))
        plane += 60 * ((x // 9 + y // 7 + c) % 2) - 30
        plane += np.random.default_rng(c).normal(0, 6, plane.shape)
        planes.append(np.clip(plane, 0, 255))
    return np.stack(planes, -1).astype(np.uint8)


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def packed(samples, depth):
    """Rows of samples [height, width * channels] as PNG packs them, each after a filter byte 0."""
    rows = []
    for row in samples:
        if depth == 16:
            rows.append(b"\0" + row.astype(">u2").tobytes())
        elif depth == 8:
            rows.append(b"\0" + row.astype(np.uint8).tobytes())
        else:
            bits = "".join(format(int(v), f"0{depth}b") for v in row)
            bits += "0" * (-len(bits) % 8)
            rows.append(b"\0" + bytes(int(bits[i:i + 8], 2) for i in range(0, len(bits), 8)))
    return b"".join(rows)


def png(samples, depth, color_type, extra=b"", interlaced=False, late=b""):
    """samples: [height, width, channels], integers of `depth` bits. late: chunks after the pixels."""
    height, width, _ = samples.shape
    if interlaced:
        data = b""
        for x, y, dx, dy in ADAM7:
            part = samples[y::dy, x::dx]
            if part.size:
                data += packed(part.reshape(part.shape[0], -1), depth)
    else:
        data = packed(samples.reshape(height, -1), depth)
    header = struct.pack(">IIBBBBB", width, height, depth, color_type, 0, 0, int(interlaced))
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + extra + chunk(b"IDAT", zlib.compress(data, 9))
            + late + chunk(b"IEND", b""))


def jpeg(array, mode="RGB", **options):
    out = io.BytesIO()
    Image.fromarray(array if array.shape[-1] != 1 else array[..., 0], mode).save(out, "JPEG", quality=88, **options)
    return out.getvalue()


def exif(orientation):
    data = Image.Exif()
    data[0x0112] = orientation
    return data.tobytes()


def frame(number, width, height):
    return chunk(b"fcTL", struct.pack(">IIIIIHHBB", number, width, height, 0, 0, 1, 1, 0, 0))


def files():
    rgb = picture(53, 37)
    random = np.random.default_rng(1)
    for name, sampling in (("444", 0), ("422", 1), ("420", 2)):
        yield f"jpeg_{name}.jpg", jpeg(rgb, subsampling=sampling)
        yield f"jpeg_{name}_progressive.jpg", jpeg(rgb, subsampling=sampling, progressive=True)
    yield "jpeg_restart.jpg", jpeg(rgb, restart_marker_blocks=3)
    yield "jpeg_rgb.jpg", jpeg(rgb, keep_rgb=True)
    yield "jpeg_grey.jpg", jpeg(rgb[..., :1], "L")
    yield "jpeg_cmyk.jpg", jpeg(picture(53, 37, 4), "CMYK")
    yield "jpeg_cmyk_progressive.jpg", jpeg(picture(53, 37, 4), "CMYK", progressive=True)
    for orientation in range(1, 9):
        yield f"exif_{orientation}.jpg", jpeg(picture(21, 13), exif=exif(orientation))
    yield "exif_6.png", png(picture(7, 5), 8, 2, chunk(b"eXIf", exif(6)[6:]))
    tiny = picture(7, 5)
    exif_3, exif_6 = (chunk(b"eXIf", exif(orientation)[6:]) for orientation in (3, 6))
    yield "exif_6_late.png", png(tiny, 8, 2, late=exif_6)
    yield "exif_6_late_cut.png", png(tiny, 8, 2, late=exif_6)[:-12]
    yield "exif_6_exif_3.png", png(tiny, 8, 2, exif_6, late=exif_3)
    yield "exif_6_introduced.png", png(tiny, 8, 2, chunk(b"eXIf", exif(6)))
    frames = chunk(b"acTL", struct.pack(">II", 2, 0)) + frame(0, 7, 5)
    second = frame(1, 7, 5) + chunk(b"fdAT", struct.pack(">I", 2) + zlib.compress(packed(tiny.reshape(5, -1), 8)))
    yield "exif_6_second_frame.png", png(tiny, 8, 2, frames, late=second + exif_6)
    yield "png_named.JPEG", png(picture(9, 8), 8, 2)
    yield "jpeg_named.png", jpeg(picture(9, 8))
    colors = random.integers(0, 256, (200, 3)).astype(np.uint8)
    for interlaced in (False, True):
        tail = "_interlaced.png" if interlaced else ".png"
        for depth in (1, 2, 4, 8):
            values = random.integers(0, 1 << depth, (11, 13, 1))
            yield f"png_grey{depth}{tail}", png(values, depth, 0, interlaced=interlaced)
            # For 8 bits the palette is shorter than the indices need; Pillow treats missing colours as black.
            palette = chunk(b"PLTE", colors[:1 << depth].tobytes())
            yield f"png_palette{depth}{tail}", png(values, depth, 3, palette, interlaced)
        for name, color_type, channels in (("grey", 0, 1), ("rgb", 2, 3), ("grey_alpha", 4, 2), ("rgba", 6, 4)):
            for depth in (8, 16):
                if name == "grey" and depth == 8:
                    continue
                values = random.integers(0, 1 << depth, (11, 13, channels))
                if name == "grey":
                    values[:6] //= 257  # Pillow clamps 16-bit grey to 255
                yield f"png_{name}{depth}{tail}", png(values, depth, color_type, interlaced=interlaced)
    values = random.integers(0, 2, (3, 4, 1))
    palette = chunk(b"PLTE", colors[:4].tobytes()) + chunk(b"tRNS", bytes([0, 128]))
    yield "png_palette_transparent.png", png(values, 8, 3, palette)
    yield "png_grey_transparent.png", png(values, 8, 0, chunk(b"tRNS", b"\0\1"))
    for bits, row in ((8, [0, 40, 200, 255]), (12, [0, 5, 300, 4095])):
        yield f"png_grey16_{bits}bits.png", png(np.array(row).reshape(1, 4, 1), 16, 0)


def fnv1a(data):
    value = 0xCBF29CE484222325
    for byte in data:
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return f"{value:016x}"


def hue(image, factor):
    """Like torchvision's adjust_hue."""
    h, s, v = image.convert("HSV").split()
    turned = np.array(h) + np.int32(factor * 255).astype(np.uint8)
    return Image.merge("HSV", (Image.fromarray(turned.astype(np.uint8), "L"), s, v)).convert("RGB")


def operations():
    """Name, arguments and result."""
    rgb = Image.open(FOLDER / "jpeg_420.jpg")
    grey = Image.open(FOLDER / "jpeg_grey.jpg")
    random = np.random.default_rng(2)
    sizes = [(53, 20), (20, 37), (53, 37), (1, 1), (224, 224), (7, 90), (106, 74), (52, 36), (54, 38)]
    sizes += [tuple(int(v) for v in random.integers(1, 120, 2)) for _ in range(40)]
    for size in sizes:
        yield ("resize", *size), rgb.resize(size, Image.Resampling.BILINEAR)
        yield ("grey_resize", *size), grey.resize(size, Image.Resampling.BILINEAR)
        yield ("mask_resize", *size), grey.resize(size, Image.Resampling.NEAREST)
    for factor in (0, 0.1, 0.37, 0.5, 0.9, 1, 1.25, 1.9, 3):
        yield ("brightness", factor), ImageEnhance.Brightness(rgb).enhance(factor)
        yield ("contrast", factor), ImageEnhance.Contrast(rgb).enhance(factor)
        yield ("saturation", factor), ImageEnhance.Color(rgb).enhance(factor)
        yield ("sharpness", factor), ImageEnhance.Sharpness(rgb).enhance(factor)
    for factor in (-0.5, -0.31, -0.01, 0, 0.004, 0.1, 0.25, 0.5):
        yield ("hue", factor), hue(rgb, factor)
    for bits in range(1, 9):
        yield ("posterize", bits), ImageOps.posterize(rgb, bits)
    for threshold in (0, 8.5, 127.5, 128, 255):
        yield ("solarize", threshold), ImageOps.solarize(rgb, threshold)
    yield ("autocontrast",), ImageOps.autocontrast(rgb)
    yield ("equalize",), ImageOps.equalize(rgb)
    for kind, enhancer in (("brightness", ImageEnhance.Brightness), ("contrast", ImageEnhance.Contrast),
                           ("saturation", ImageEnhance.Color), ("sharpness", ImageEnhance.Sharpness)):
        yield (f"grey_{kind}", 0.4), enhancer(grey).enhance(0.4)
    yield ("grey_autocontrast",), ImageOps.autocontrast(grey)
    yield ("grey_equalize",), ImageOps.equalize(grey)
    for angle in (-135, -90, -30, -1, 0, 4.5, 29.7, 45, 90, 101, 135, 180):
        yield ("rotate", angle), rgb.rotate(angle, Image.Resampling.NEAREST)
    for m in ((1, 0.3, 0, 0, 1, 0), (1, 0, 0, -0.27, 1, 0), (1, 0, 5, 0, 1, -9), (0.9, 0.2, -3.4, -0.1, 1.2, 2.2)):
        yield ("affine", *m), rgb.transform(rgb.size, Image.Transform.AFFINE, m, Image.Resampling.NEAREST)


def line(image):
    image = image.convert("RGB")
    return f"{image.width} {image.height} {fnv1a(image.tobytes())}"


def main():
    warnings.simplefilter("ignore")
    FOLDER.mkdir(exist_ok=True)
    lines = []
    for name, data in files():
        (FOLDER / name).write_bytes(data)
        image = Image.open(FOLDER / name)
        lines.append(f"{name} {line(image)} {line(ImageOps.exif_transpose(image))}\n")
    (FOLDER / "images.txt").write_text("".join(lines))
    lines = []
    for call, image in operations():
        lines.append(" ".join(str(v) for v in call) + f" = {image.width} {image.height} {fnv1a(image.tobytes())}\n")
    (FOLDER / "operations.txt").write_text("".join(lines))


if __name__ == "__main__":
    main()
