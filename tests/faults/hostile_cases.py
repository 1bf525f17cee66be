"""Malicious and damaged files for the commands that read files."""
import io, json, os, pickle, shutil, struct, subprocess, sys, tarfile, zipfile, zlib

from job import *

IMAGES = os.path.join(ROOT, "tests", "data", "images")
SECONDS, MEMORY = 1, 16  # processor time, and MiB, more than the same command needs for a harmless file


# A process inherits the peak memory of the process that started it, so a small one starts `train`.
MEASURE = """
import os, subprocess, sys
with open(sys.argv[1], "w") as log:
    program = subprocess.Popen(sys.argv[2:], stdout=log, stderr=log)
_, status, usage = os.wait4(program.pid, 0)
print(os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)
"""


def run(job, words):
    """Runs `train`. Returns exit code, output, seconds of processor time and the largest resident memory in MiB."""
    log = job.path("output")
    measured = subprocess.run([sys.executable, "-c", MEASURE, log, job.train_program, *words], cwd=job.folder, check=True,
                              capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    code, seconds, memory = measured.stdout.split()
    return int(code), open(log, errors="replace").read(), float(seconds), float(memory)


def refuse_all(job, files, command, harmless="missing"):
    """Gives each file (name to bytes) to the command, which has to refuse it. Returns the figures.

    They are compared with those for a harmless file, or for a file that does not exist.
    """
    begins = [run(job, command(harmless)) for _ in range(3)]
    seconds, memory = min(one[2] for one in begins), max(one[3] for one in begins)
    slowest, largest, problems = 0, 0, []
    for name, content in files.items():
        open(job.path(name), "wb").write(content)
        code, output, took, used = run(job, command(name))
        if code != 2 or name.split("/")[-1].split(".")[0] not in output or "terminate" in output:
            problems.append(f"{name}: exit code {code}: {output[-300:]}")
        if took - seconds > SECONDS or used - memory > MEMORY:
            problems.append(f"{name}: {took - seconds:.2f} s and {used - memory:.1f} MiB more")
        slowest, largest = max(slowest, took - seconds), max(largest, used - memory)
        os.remove(job.path(name))
    check(not problems, "\n  ".join(problems))
    return {"files": len(files), "longer than for a harmless one": slowest, "more memory": f"{largest:.1f} MiB"}


def safetensors(header, data=b"", size=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def entry(begin, end, shape, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def torch_file(data_pickle, storages={}, method=zipfile.ZIP_STORED):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.writestr("archive/data.pkl", data_pickle)
        archive.writestr("archive/version", "3\n")
        for name, content in storages.items():
            archive.writestr(f"archive/data/{name}", content)
    return file.getvalue()


class Calls:
    def __init__(self, function, *arguments):
        self.all = (function, arguments)

    def __reduce__(self):
        return self.all


def tensor_pickle(sizes, strides, offset=0, elements=4):
    """A state dict with one tensor, as torch.save writes it."""
    def integers(all):
        return b"(" + b"".join(b"\x8a\x08" + struct.pack("<q", one) for one in all) + b"t"
    return (b"\x80\x02}U\x01wctorch._utils\n_rebuild_tensor_v2\n((U\x07storagectorch\nFloatStorage\nU\x010U\x03cpuJ"
            + struct.pack("<i", elements) + b"tQ" + integers([offset])[1:-1] + integers(sizes) + integers(strides)
            + b"\x89ccollections\nOrderedDict\n)RtRs.")


@case("20", "Hostile weights (safetensors, .pth, ONNX) for `train --init`: refused", runs=1, deadline=lambda: 600)
def hostile_weights(job, run):
    ok = entry(0, 4, [1])
    state = pickle.dumps({"w": [1.0]}, 2)
    many = 100_000  # as in huggingface/safetensors' attacks/safetensors_abuse_attempt_3.py
    files = {
        # Headers.
        "length_2_63.safetensors": safetensors({"w": ok}, bytes(4), 1 << 63),
        "length_beyond.safetensors": safetensors({"w": ok}, bytes(4), 1000),
        "length_0.safetensors": safetensors(b"", bytes(4)),
        "not_json.safetensors": safetensors(b"{" * 1000),
        "deep.safetensors": safetensors(b'{"w":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}"),
        "many_sizes.safetensors": safetensors(b'{"w":{"dtype":"F32","shape":[' + b"1," * 1_000_000 + b'1],"data_offsets":[0,4]}}',
                                              bytes(4)),
        "many_values.safetensors": safetensors(b'{"w":{"dtype":[' + b"0," * 1_000_000 + b'1]}}'),
        "overlapping.safetensors": safetensors({f"weight_{i}": entry(0, 160_000, [200, 200]) for i in range(many)}, bytes(160_000)),
        "hole.safetensors": safetensors({"w": ok, "v": entry(8, 12, [1])}, bytes(12)),
        "beyond.safetensors": safetensors({"w": entry(0, 1 << 40, [1 << 38])}, bytes(4)),
        "negative.safetensors": safetensors({"w": entry(0, 4, [-1])}, bytes(4)),
        "overflow.safetensors": safetensors({"w": entry(0, 0, [1 << 32, 1 << 32])}, b""),
        "overlapping_45000.safetensors": safetensors({f"weight_{i}": entry(0, 4, [1]) for i in range(45_000)}, bytes(4)),
        "twice.safetensors": safetensors(b'{"w":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},'
                                         b'"w":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'),
        "empty_arrays.safetensors": safetensors(b'{"w":{"dtype":[' + b"[]," * 300_000 + b'1]}}'),
        "many_empty.safetensors": safetensors(b"{" + b'"":{},' * 500_000 + b'"w":{}}'),
        "many_metadata.safetensors": safetensors(b'{"__metadata__":{' + b'"":"",' * 500_000 + b'"":""},"w":{}}'),
        "metadata.safetensors": safetensors({"__metadata__": {"k": "x" * 3_000_000}, "w": entry(0, 8, [1])}, bytes(4)),
        # Pickles, which are programs.
        "os_system.pth": torch_file(pickle.dumps(Calls(os.system, "touch was_here"), 2)),
        "eval.pth": torch_file(pickle.dumps({"w": Calls(eval, "open('was_here', 'w')")}, 2)),
        "legacy_os_system.pth": pickle.dumps(Calls(os.system, "touch was_here"), 2),
        "none_million.pth": torch_file(b"\x80\x02(" + b"N" * 900_000 + b"t."),
        "copies.pth": torch_file(b"\x80\x02]q\x00(" + b"K\x01" * 90_000 + b"e0("
                                 + b"c__builtin__\nset\nh\x00\x85R" * 170 + b"t."),
        "memo.pth": torch_file(b"\x80\x02K\x01" + b"".join(b"r" + struct.pack("<I", i) for i in range(1_000_000)) + b"."),
        "marks.pth": torch_file(b"\x80\x02" + b"(" * 15_000_000 + b"."),
        "long_text.pth": torch_file(b"\x80\x02X" + struct.pack("<I", 0xffffffff) + b"x."),
        "itself.pth": torch_file(b"\x80\x02}q\x00U\x01wh\x00s."),
        "beyond.pth": torch_file(tensor_pickle([1 << 40], [1]), {"0": bytes(16)}),
        "expanded.pth": torch_file(tensor_pickle([1 << 40], [0]), {"0": bytes(16)}),
        "overflow.pth": torch_file(tensor_pickle([1 << 62, 4], [1 << 62, 1]), {"0": bytes(16)}),
        "offset.pth": torch_file(tensor_pickle([1], [1], -1), {"0": bytes(16)}),
        # Archives.
        "bomb.pth": torch_file(state, {"0": bytes(50_000_000)}, zipfile.ZIP_DEFLATED),
        "twice.pth": twice(torch_file(state)),
        "shared.pth": shared(torch_file(state), 1000),
        "cut.pth": torch_file(state)[:-30],
        "directory.pth": torch_file(state)[:-12] + b"\xff" * 12,
        "empty.pth": b"",
        # No ONNX: only `export` writes it, and no command reads it.
        "external_data.onnx": b"\x08\x08:\x40*\x3e\x08\x01\x10\x01B\x01wj\x1d\n\x08location\x12\x11../../etc/passwd00p\x01",
    }
    config = os.path.join(ROOT, "configs", "digits.yaml")
    command = lambda name: ["--config", config, "--run_dir=run", "--overwrite", "--epochs=1", f"--init={name}"]
    try:
        return refuse_all(job, files, command)
    finally:
        check(not os.path.exists(job.path("was_here")), "a pickle was executed")


def twice(archive):
    """An archive whose table of contents has an entry twice."""
    with zipfile.ZipFile(io.BytesIO(archive)) as one:
        begin = one.start_dir
    end = archive.rindex(b"PK\x05\x06")
    table = archive[begin:end]
    return archive[:begin] + table * 2 + archive[end:end + 8] + struct.pack("<HHII", 4, 4, 2 * len(table), begin) + b"\0\0"


def shared(archive, count):
    """An archive with `count` entries that share their bytes, like a zip bomb without nesting."""
    with zipfile.ZipFile(io.BytesIO(archive)) as one:
        begin = one.start_dir
    end = archive.rindex(b"PK\x05\x06")
    first = archive[begin:end]
    name_size = struct.unpack_from("<H", first, 28)[0]
    fixed, name = bytearray(first[:46]), first[46:46 + name_size]
    table = b""
    for index in range(count):
        struct.pack_into("<H", fixed, 28, len(name) + 6)
        struct.pack_into("<HH", fixed, 30, 0, 0)
        table += bytes(fixed) + name + b"%06d" % index
    return archive[:begin] + table + archive[end:end + 8] + struct.pack("<HHII", count, count, len(table), begin) + b"\0\0"


@case("20", "Hostile YAML for `train --config`: refused", runs=1, deadline=lambda: 600)
def hostile_yaml(job, run):
    names = "abcdefghij"
    bomb = 'a: &a ["x","x","x","x","x","x","x","x","x","x"]\n' + "".join(
        f"{one}: &{one} [{','.join(['*' + before] * 10)}]\n" for before, one in zip(names, names[1:]))
    files = {
        "aliases.yaml": bomb.encode(),
        "merges.yaml": ("a: &a {x: 1}\n" + "".join(f"{one}: &{one} {{<<: [{','.join(['*' + before] * 10)}]}}\n"
                                                   for before, one in zip(names, names[1:]))).encode(),
        "itself.yaml": b"model: &m [*m]\n",
        "deep.yaml": b"model: " + b"[" * 100_000 + b"]" * 100_000,
        "deep_map.yaml": b"model: " + b"{a: " * 100_000 + b"}" * 100_000,
        "deep_block.yaml": b"".join(b" " * depth + b"a:\n" for depth in range(1000)),
        "dashes.yaml": b"- " * 200_000,
        "question_marks.yaml": b"? " * 200_000,
        "quoted.yaml": b"model:\n" + b' - "a"\n' * 9_900,
        "many_flow.yaml": b"model: {" + b"a," * 130_000 + b"}",
        "many_items.yaml": b"model: [" + b"a," * 130_000 + b"]",
        "many_short.yaml": b"model:\n" + b"".join(b" k%d: 1\n" % i for i in range(20_000)),
        "many.yaml": b"model:\n" + b"".join(b"  k%d: 1\n" % i for i in range(60_000)),
        "large.yaml": b"# " + b"x" * (64 << 20),
        "tags.yaml": b"model: !!python/object/apply:os.system ['touch was_here']\n",
        "zeros.yaml": bytes(100_000),
        "not_utf8.yaml": b"model: \xff\xfe\xfd\n",
        "long_key.yaml": b"x" * 900_000 + b": 1\n",
        "integer.yaml": b"epochs: " + b"9" * 500_000 + b"\n",
    }
    return refuse_all(job, files, lambda name: ["--config", name])


# The smallest networks and images.
PHOTOS = """
{seed: 0, epochs: 1, batch_size: 2, report: false, model: {type: digits, width: 4}, optimizer: {type: sgd, lr: 0.1},
 data: {type: %s, %s, transforms: [{type: resize, size: 8}, {type: center_crop, size: 8}],
        test_transforms: [{type: resize, size: 8}, {type: center_crop, size: 8}]}}
"""


def photo(name):
    return open(os.path.join(IMAGES, name), "rb").read()


def photo_folder(job, name, count):
    """A data set with two classes."""
    for label, image in (("a", "jpeg_420.jpg"), ("b", "jpeg_444.jpg")):
        os.makedirs(job.path(name, label))
        for index in range(count):
            shutil.copy(os.path.join(IMAGES, image), job.path(name, label, f"{index}.jpg"))
    open(job.path("photos.yaml"), "w").write(PHOTOS % ("image_folder", f"train: {name}, test: {name}"))


def segment(jpeg, marker):
    """Offset and length of the first segment with this marker, in a JPEG file."""
    at = 2
    while jpeg[at + 1] != marker:
        at += 2 + struct.unpack_from(">H", jpeg, at + 2)[0]
    return at, 2 + struct.unpack_from(">H", jpeg, at + 2)[0]


def jpeg_of_size(width, height):
    image = bytearray(photo("jpeg_420.jpg"))
    struct.pack_into(">HH", image, segment(image, 0xc0)[0] + 5, height, width)
    return bytes(image)


def png(width, height, rows, depth=8, color=0, more=b""):
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)) + more
            + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


def chunk(kind, content, length=None):
    length = len(content) if length is None else length
    return struct.pack(">I", length) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


@case("20", "Hostile JPEG and PNG files for `train predict`: refused", runs=1, deadline=lambda: 600)
def hostile_images(job, run_number):
    photo_folder(job, "photos", 4)
    shutil.copy(job.path("photos", "a", "0.jpg"), job.path("good.jpg"))
    code, output, *_ = run(job, ["--config", "photos.yaml", "--run_dir=run"])
    check(code == 0, output)
    jpeg, progressive = photo("jpeg_420.jpg"), photo("jpeg_420_progressive.jpg")
    scan, _ = segment(progressive, 0xda)
    tables, length = segment(jpeg, 0xc4)
    files = {
        "65535.jpg": jpeg_of_size(65535, 65535),
        "no_height.jpg": jpeg_of_size(16, 0),
        "no_width.jpg": jpeg_of_size(0, 16),
        "cut_header.jpg": jpeg[:100],
        "cut_data.jpg": jpeg[:-200],
        "scans.jpg": progressive[:-2] + progressive[scan:-2] * 500 + b"\xff\xd9",
        "tables.jpg": jpeg[:tables + 4] + b"\xff" * (length - 4) + jpeg[tables + length:],
        "components.jpg": jpeg.replace(b"\x03\x01\x22\x00", b"\xff\x01\x22\x00", 1),
        "markers.jpg": b"\xff\xd8" + b"\xff\xe1\xff\xff" + b"x" * 65533 + b"\xff" * 1_000_000,
        "noise.jpg": b"\xff\xd8\xff\xdb" + os.urandom(100_000),
        "65535.png": png(65535, 65535, b"\0"),
        "2_31.png": png((1 << 31) - 1, (1 << 31) - 1, b"\0"),
        "no_size.png": png(0, 0, b"\0"),
        "bomb.png": png(8001, 8000, bytes(8002 * 8000)),
        "short.png": png(100, 100, bytes(50)),
        "no_palette.png": png(8, 8, bytes(72), color=3),
        "depth.png": png(8, 8, bytes(72), depth=7),
        "chunk_2_gb.png": png(8, 8, bytes(72))[:33] + chunk(b"zTXt", b"x", (1 << 31) - 1),
        "profile_bomb.png": png(8, 8, bytes(10), more=chunk(b"iCCP", b"x\0\0" + zlib.compress(bytes(64 << 20)))),
        "text_bomb.png": png(8, 8, bytes(10), more=chunk(b"zTXt", b"x\0\0" + zlib.compress(bytes(64 << 20)))),
        "many_chunks.png": png(8, 8, bytes(10), more=chunk(b"tEXt", b"a\0b") * 100_000),
        "checksum.png": png(8, 8, bytes(72))[:29] + bytes(4) + png(8, 8, bytes(72))[33:],
        "empty.png": b"",
        "gif.jpg": b"GIF89a" + bytes(100),
    }
    return refuse_all(job, files, lambda name: ["predict", name, "--config=run/config.yaml", "--output=out", "--overwrite"], "good.jpg")


def tar(*members):
    """A tar file of (name, content) pairs, with changes to the header."""
    archive = b""
    for name, content, *changes in members:
        info = tarfile.TarInfo(name)
        info.size = len(content)
        header = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
        for at, text in changes:
            header[at:at + len(text)] = text
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
        archive += bytes(header) + content + bytes(-len(content) % 512)
    return archive + bytes(1024)


def pax(**records):
    """The content of an extended header."""
    lines = b""
    for key, value in records.items():
        rest = f" {key}={value}\n".encode()
        size = len(rest) + 2 if len(rest) < 98 else len(rest) + 3
        lines += str(size).encode() + rest
    return lines


@case("20", "Hostile tar shards for `train`: refused", runs=1, deadline=lambda: 600)
def hostile_tars(job, run_number):
    open(job.path("photos.yaml"), "w").write(PHOTOS % ("tar_shards", "train: good.tar, test: good.tar, classes: 2"))
    jpeg = photo("jpeg_420.jpg")
    sample = (("0.jpg", jpeg), ("0.cls", b"1"))
    size, kind = 124, 156  # offsets of fields
    files = {
        "negative.tar": tar(*sample, ("1.jpg", jpeg, (size, b"\xff" * 12))),
        "minus.tar": tar(*sample, ("1.jpg", jpeg, (size, b"-0000000001\0"))),
        "digits.tar": tar(*sample, ("1.jpg", jpeg, (size, b"9999999999x\0"))),
        "2_63.tar": tar(*sample, ("1.jpg", jpeg, (size, b"\x80\0\0\0\x7f" + b"\xff" * 7))),
        "beyond.tar": tar(*sample, ("1.jpg", jpeg, (size, b"77777777777\0"))),
        "parent.tar": tar(*sample, ("../../1.jpg", jpeg), ("../../1.cls", b"1")),
        "absolute.tar": tar(*sample, ("/etc/1.jpg", jpeg), ("/etc/1.cls", b"1")),
        "symlink.tar": tar(*sample, ("1.jpg", b"", (kind, b"2/etc/passwd"))),
        "link.tar": tar(*sample, ("1.jpg", b"", (kind, b"1/etc/passwd"))),
        "device.tar": tar(*sample, ("1.jpg", b"", (kind, b"3"))),
        "fifo.tar": tar(*sample, ("1.jpg", b"", (kind, b"6"))),
        "sparse.tar": tar(*sample, ("1.jpg", jpeg, (kind, b"S"))),
        "checksum.tar": tar(*sample)[:150] + b"77" + tar(*sample)[152:],
        "long_name.tar": tar(("n", b"x" * 10_000_000, (kind, b"L")), *sample),
        "pax_negative.tar": tar(("h", pax(size="-1"), (kind, b"x")), *sample),
        "pax_large.tar": tar(("h", pax(size="9223372036854775807"), (kind, b"x")), *sample),
        "pax_parent.tar": tar(("h", pax(path="../../1.jpg"), (kind, b"x")), *sample),
        "pax_long.tar": tar(("h", pax(path="x" * 10_000_000), (kind, b"x")), *sample),
        "class_words.tar": tar(("0.jpg", jpeg), ("0.cls", b"one")),
        "class_large.tar": tar(("0.jpg", jpeg), ("0.cls", b"9" * 1_000_000)),
        "class_negative.tar": tar(("0.jpg", jpeg), ("0.cls", b"-1")),
        "class_beyond.tar": tar(("0.jpg", jpeg), ("0.cls", b"2")),
        "cut.tar": tar(*sample)[:700],
        "empty.tar": b"",
        "zip.tar": torch_file(b""),
        "many_members.tar": tar(*(("0.txt", b"") for _ in range(30_000))),
    }
    open(job.path("good.tar"), "wb").write(tar(*sample, ("1.jpg", jpeg), ("1.cls", b"0")))
    command = lambda name: ["--config=photos.yaml", f"--data.train={name}", "--run_dir=run", "--overwrite", "--data.cache_dir=cache"]
    return refuse_all(job, files, command, "good.tar")


@case("21", "1 % of the JPEG files are damaged, --loader.on_error=skip: left out, and counted", runs=1)
def damaged_images(job, run_number):
    photo_folder(job, "photos", 250)
    damaged = [job.path("photos", label, f"{index}.jpg") for label in "ab" for index in (3, 77)] + [job.path("photos", "a", "9.jpg")]
    for path in damaged:
        content = open(path, "rb").read()
        open(path, "wb").write((content[:len(content) // 2], b"", content[:30], os.urandom(500))[damaged.index(path) % 4])
    code, output, *_ = run(job, ["--config=photos.yaml", "--run_dir=run", "--loader.on_error=skip"])
    check(code == 0, f"exit code {code}: {output[-500:]}")
    check(all(path.removeprefix(job.path("")) in output for path in damaged), f"not all are named: {output}")
    check("evaluation left out 5 damaged samples" in output, f"not counted: {output}")
    code, output, *_ = run(job, ["--config=photos.yaml", "--run_dir=run2", "--loader.on_error=skip", "--loader.error_budget=0"])
    check(code != 0 and "error_budget" in output, f"above the budget, exit code {code}: {output[-500:]}")
    return {"damaged files": f"{len(damaged)} of 500"}
