#include <syncbn/models/weights.h>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/models/torch_archive.h>

#include "support/once.h"
#include "support/program.h"
#include "support/python.h"
#include "support/skip.h"
#include "support/temp_folder.h"
#include "support/thrown.h"

namespace syncbn::models {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;

std::string error_of(const std::function<void()>& work) {
  return test::message_of<base::UserError>(work);
}

std::string reading_error(const std::string& path, const std::string& key = "") {
  return error_of([&] { read_state_dict(path, key); });
}

/// Writes one state in all the forms that are in use.
constexpr const char* kPythonSaves = R"(
import argparse, collections, sys
import torch
folder = sys.argv[1]

def wave(*shape, dtype=torch.float32):
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype) / 4

net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Linear(4, 2))
with torch.no_grad():
    for tensor in net.state_dict().values():
        tensor.copy_(wave(*tensor.shape) if tensor.dim() else torch.tensor(7))
state = net.state_dict()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3])
with_prefix = lambda prefix: collections.OrderedDict((prefix + k, v) for k, v in state.items())
run = {"epoch": 3, "arch": "net", "state_dict": with_prefix("module."), "best_acc1": torch.tensor(71.5),
       "optimizer": optimizer.state_dict(), "scheduler": schedule.state_dict()}
reference = {"model": state, "optimizer": optimizer.state_dict(), "lr_scheduler": schedule.state_dict(), "epoch": 1,
             "args": argparse.Namespace(lr=0.1, data=None, sizes=[1, 2]), "big": 2**70, "neg": -3, "flags": {1, 2},
             "model_ema": {"n_averaged": torch.tensor(5), **with_prefix("module.")}}
files = {"bare": state, "dict": dict(state), "ddp": with_prefix("module."), "compiled": with_prefix("_orig_mod.module."),
         "imagenet": run, "reference": reference, "parameters": dict(net.named_parameters()) | dict(net.named_buffers())}
for name, what in files.items():
    torch.save(what, f"{folder}/{name}.pth")
    torch.save(what, f"{folder}/{name}.legacy.pth", _use_new_zipfile_serialization=False)
    torch.save(what, f"{folder}/{name}.protocol4.pth", pickle_protocol=4)
shared = wave(4, 6)
odd = {"transposed": shared.t(), "slice": shared[1:3, 2:4], "whole": shared, "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3),
       "expanded": torch.ones(1).expand(3, 2), "half": wave(5, dtype=torch.float16), "bf16": wave(5, dtype=torch.bfloat16),
       "double": wave(5, dtype=torch.float64), "int": torch.arange(5), "short": torch.arange(5, dtype=torch.int16),
       "byte": torch.arange(5, dtype=torch.uint8), "bool": torch.tensor([True, False, True])}
torch.save(odd, f"{folder}/odd.pth")
torch.save(odd, f"{folder}/odd.legacy.pth", _use_new_zipfile_serialization=False)
class Evil:
    def __reduce__(self):
        import os
        return os.system, ("touch " + os.environ["SYNCBN_SUITE_FOLDER"] + "/executed",)
torch.save({"state_dict": state, "evil": Evil()}, f"{folder}/evil.pth")
torch.save(net, f"{folder}/whole.pth")
torch.save([1, 2], f"{folder}/list.pth")
torch.save({"epoch": 3, "lr": 0.1}, f"{folder}/none.pth")
endless = [1]
endless.append(endless)
torch.save(endless, f"{folder}/endless.pth")
torch.jit.script(net).save(f"{folder}/script.pth")
)";

at::Tensor ramp(at::IntArrayRef shape) {
  return at::arange(c10::multiply_integers(shape), at::kFloat).reshape(shape) / 4;
}

torch::nn::Sequential network() {
  return torch::nn::Sequential(torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 4, 3)),
                               torch::nn::BatchNorm2d(4), torch::nn::Linear(4, 2));
}

class PythonWeightsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    SYNCBN_SKIP_UNLESS(test::python_has_torch(), "python-torch");
    made_ = test::once("weights", [](const std::string& path) {
      fs::create_directory(path);
      const auto made = test::run_program({test::python(), "-c", kPythonSaves, path});
      EXPECT_EQ(made.exit_code, 0) << made.err;
    });
  }

  std::string file(const std::string& name) const { return made_ / name; }

  static void expect_state(const StateDict& weights, const std::string& what) {
    auto net = network();
    EXPECT_NO_THROW(load_state_dict(*net, weights)) << what;
    for (const auto& item : state_dict(*net)) {
      const at::Tensor& tensor = item.value();
      EXPECT_TRUE(at::equal(
          tensor, tensor.dim() > 0 ? ramp(tensor.sizes()) : at::scalar_tensor(7, at::kLong)))
          << what << " " << item.key();
    }
  }

  fs::path made_;
  const test::TempFolder folder_;
};

TEST_F(PythonWeightsTest, AreReadInAllTheFormsThatPeopleHave) {
  for (const char* name :
       {"bare", "dict", "ddp", "compiled", "imagenet", "reference", "parameters"}) {
    for (const char* format : {".pth", ".legacy.pth", ".protocol4.pth"}) {
      const std::string path = file(std::string(name) + format);
      expect_state(read_state_dict(path), path);
    }
  }
  expect_state(read_state_dict(file("reference.pth"), "model_ema"), "model_ema");
  EXPECT_THAT(reading_error(file("reference.pth"), "ema"),
              AllOf(HasSubstr("reference.pth: it has no tensors at 'ema'; its keys are model, "
                              "optimizer, lr_scheduler, epoch"),
                    Not(HasSubstr("\n"))));
}

TEST_F(PythonWeightsTest, MayBeViewsOfAnyTypeAndShareMemory) {
  for (const char* name : {"odd.pth", "odd.legacy.pth"}) {
    StateDict odd = read_state_dict(file(name));
    const at::Tensor shared = ramp({4, 6});
    EXPECT_TRUE(at::equal(odd["transposed"], shared.t()));
    EXPECT_TRUE(at::equal(odd["slice"], shared.slice(0, 1, 3).slice(1, 2, 4)));
    EXPECT_TRUE(at::equal(odd["expanded"], at::ones({3, 2})));
    EXPECT_EQ(odd["scalar"].item<float>(), 2.5F);
    EXPECT_EQ(odd["empty"].sizes(), at::IntArrayRef({0, 3}));
    EXPECT_EQ(odd["whole"].storage().data_ptr(), odd["transposed"].storage().data_ptr());
    for (const auto& [key, dtype] : std::vector<std::pair<std::string, at::ScalarType>>{
             {"half", at::kHalf}, {"bf16", at::kBFloat16}, {"double", at::kDouble}}) {
      EXPECT_TRUE(at::equal(odd[key], ramp({5}).to(dtype))) << key;
    }
    for (const auto& [key, dtype] : std::vector<std::pair<std::string, at::ScalarType>>{
             {"int", at::kLong}, {"short", at::kShort}, {"byte", at::kByte}}) {
      EXPECT_TRUE(at::equal(odd[key], at::arange(5, dtype))) << key;
    }
    EXPECT_TRUE(at::equal(odd["bool"], at::tensor({1, 0, 1}).to(at::kBool)));
    const std::string before = base::read_file(file(name));
    odd["whole"].fill_(1);
    EXPECT_EQ(base::read_file(file(name)), before) << "tensors may change, not the file";
  }
}

TEST_F(PythonWeightsTest, AllValuesOfAFileAreRead) {
  for (const char* format : {".pth", ".legacy.pth", ".protocol4.pth"}) {
    const Dict run = read_torch_values(file(std::string("reference") + format)).toGenericDict();
    EXPECT_EQ(run.at("epoch").toInt(), 1);
    EXPECT_EQ(run.at("neg").toInt(), -3);
    EXPECT_EQ(run.at("flags").toListRef().size(), 2);
    EXPECT_TRUE(at::equal(run.at("model").toGenericDict().at("0.bias").toTensor(), ramp({4})));
    const Dict args = run.at("args").toGenericDict();
    EXPECT_EQ(args.at("lr").toDouble(), 0.1);
    EXPECT_TRUE(args.at("data").isNone());
    EXPECT_EQ(args.at("sizes").toListRef()[1].toInt(), 2);
    const Dict milestones = run.at("lr_scheduler").toGenericDict().at("milestones").toGenericDict();
    EXPECT_EQ(milestones.at(2).toInt(), 1);
    const Dict group =
        run.at("optimizer").toGenericDict().at("param_groups").toListRef()[0].toGenericDict();
    EXPECT_EQ(group.at("params").toListRef().size(), 6);
    EXPECT_FALSE(group.at("nesterov").toBool());
  }
  EXPECT_THAT(error_of([&] { read_torch_values(file("endless.pth")); }),
              HasSubstr("endless.pth: its values are nested too deeply"));
  EXPECT_THAT(error_of([&] { read_torch_values(file("evil.pth")); }), HasSubstr("posix.system"));
}

TEST_F(PythonWeightsTest, NothingInThemIsExecuted) {
  EXPECT_THAT(reading_error(file("evil.pth")),
              HasSubstr("evil.pth: its pickle needs the Python object posix.system, which weights "
                        "do not consist of (nothing was executed)"));
  EXPECT_FALSE(fs::exists(made_.parent_path() / "executed"));
  EXPECT_THAT(reading_error(file("whole.pth")),
              AllOf(HasSubstr("torch.nn.modules.container.Sequential"),
                    HasSubstr("save model.state_dict() instead")));
}

TEST_F(PythonWeightsTest, WhatHoldsNoWeightsIsNamed) {
  EXPECT_THAT(reading_error(file("list.pth")), HasSubstr("it holds no dictionary"));
  EXPECT_THAT(reading_error(file("none.pth")),
              HasSubstr("it has no tensors at state_dict, model or model_ema; its keys are epoch, "
                        "lr"));
  EXPECT_THAT(reading_error(file("script.pth")), HasSubstr("it is a TorchScript program"));
  EXPECT_THAT(reading_error(file("missing.pth")), HasSubstr("No such file"));
  EXPECT_THAT(reading_error(folder_.path()), HasSubstr("not a run of train"));
  base::write_file_atomically(folder_ / "empty.pth", "");
  EXPECT_THAT(reading_error(folder_ / "empty.pth"), HasSubstr("it is empty"));
  base::write_file_atomically(folder_ / "text.pth", "epochs: 3\n");
  EXPECT_THAT(reading_error(folder_ / "text.pth"),
              HasSubstr("neither a file of torch.save nor safetensors"));
}

/// Not base::write_file_atomically(), which waits for the disk.
void write(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

/// Reads all tensors of a changed file, or is refused. If a tensor reaches beyond the file, a
/// sanitizer or a signal ends the test.
void read_all(const std::string& path) {
  try {
    for (const auto& item : read_state_dict(path)) item.value().to(at::kFloat).sum();
  } catch (const base::UserError&) {
  }
}

TEST_F(PythonWeightsTest, DamageIsFoundOrDoesNoHarm) {
  std::mt19937_64 random(1);
  const auto below = [&](size_t n) { return random() % n; };
  for (const std::string name :
       {"reference.pth", "reference.legacy.pth", "reference.protocol4.pth", "odd.legacy.pth"}) {
    const std::string whole = base::read_file(file(name));
    for (int i = 0; i < 100; ++i) {
      write(folder_ / "cut", whole.substr(0, below(whole.size())));
      EXPECT_NE(reading_error(folder_ / "cut"), "") << name;
    }
    for (int i = 0; i < 600; ++i) {
      std::string changed = whole;
      for (size_t n = below(3) + 1; n > 0; --n) {
        changed[below(changed.size())] = static_cast<char>(below(256));
      }
      write(folder_ / "changed", changed);
      read_all(folder_ / "changed");
    }
  }
  // A zip archive contains checksums.
  const std::string whole = base::read_file(file("bare.pth"));
  const StateDict before = read_state_dict(file("bare.pth"));
  const char* const data = static_cast<const char*>(before["0.weight"].const_data_ptr());
  const size_t place = whole.find(std::string(data, 64));
  ASSERT_NE(place, whole.npos);
  std::string changed = whole;
  changed[place + 5] ^= 1;
  write(folder_ / "changed.pth", changed);
  EXPECT_THAT(reading_error(folder_ / "changed.pth"),
              HasSubstr("is damaged: the checksum is wrong"));
}

constexpr const char* kHostileFiles = R"(
import struct, sys, zipfile
folder = sys.argv[1]
def archive(name, pickle):
    with zipfile.ZipFile(f"{folder}/{name}", "w") as file:
        file.writestr("archive/data.pkl", pickle)
def text(value):
    return b"X" + struct.pack("<I", len(value)) + value
# A dictionary of 1,000 pairs, and 200,000 copies of it.
pairs = b"}q\x00(" + b"".join(text(str(i).encode()) + b"K\x01" for i in range(1000)) + b"u0"
archive("copies", b"\x80\x02" + pairs + b"ccollections\nOrderedDict\nq\x010" + b"h\x01h\x00\x85R0" * 200000 + b"}.")
# A text of 100 kB, and as many copies.
archive("texts", b"\x80\x02" + text(b"x" * 100000) + b"q\x000ctorch\ndevice\nq\x010" + b"h\x01h\x00\x85R0" * 200000 + b"}.")
archive("attributes", b"\x80\x02" + pairs + b"cargparse\nNamespace\nq\x010" + b"h\x01)\x81h\x00b0" * 200000 + b"}.")
archive("marks", b"\x80\x02" + b"(" * 20000000 + b".")
archive("memo", b"\x80\x04N" + b"\x94" * 3000000 + b".")
archive("gets", b"\x80\x02Nq\x00" + b"h\x00" * 20000000 + b".")
# Forty entries over the same bytes.
with zipfile.ZipFile(f"{folder}/overlap", "w") as file:
    file.writestr("archive/data.pkl", b"\x80\x02}.")
    file.writestr("archive/data/0", b"\0" * 1000)
    shared = file.getinfo("archive/data/0")
    for i in range(1, 40):
        info = zipfile.ZipInfo(f"archive/data/{i}")
        for field in ["header_offset", "CRC", "compress_size", "file_size"]:
            setattr(info, field, getattr(shared, field))
        file.filelist.append(info)
archive("deep", b"\x80\x02" + b"]q\x00" + b"]" * 50000 + b"a" * 50000 + b".")
# A storage of four bytes, as float and as int.
def tensor(kind):
    storage = b"(" + text(b"storage") + b"ctorch\n" + kind + b"\n" + text(b"0") + text(b"cpu") + b"K\x01tQ"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\x00K\x01\x85K\x01\x85tR"
with zipfile.ZipFile(f"{folder}/types", "w") as file:
    file.writestr("archive/data.pkl", b"\x80\x02}(" + text(b"a") + tensor(b"FloatStorage") + text(b"b") + tensor(b"IntStorage") + b"u.")
    file.writestr("archive/data/0", b"\0" * 4)
# One value with a stride of zero and 2^40 elements.
with zipfile.ZipFile(f"{folder}/huge", "w") as file:
    storage = b"(" + text(b"storage") + b"ctorch\nFloatStorage\n" + text(b"0") + text(b"cpu") + b"K\x01tQ"
    sizes = b"\x8a\x06" + (1 << 40).to_bytes(6, "little") + b"\x85K\x00\x85"
    file.writestr("archive/data.pkl", b"\x80\x02}(" + text(b"a") + b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\x00" + sizes + b"tRu.")
    file.writestr("archive/data/0", b"\0" * 4)
)";

TEST(WeightsTest, SmallFilesDoNotTakeMuchMemory) {
  const test::TempFolder folder;
  const auto made = test::run_program({test::python(), "-c", kHostileFiles, folder.path()});
  ASSERT_EQ(made.exit_code, 0) << made.err;
  for (const char* name : {"copies", "texts", "attributes", "memo", "gets", "huge"}) {
    EXPECT_THAT(reading_error(folder / name), HasSubstr("would take too much memory")) << name;
  }
  EXPECT_THAT(reading_error(folder / "marks"), HasSubstr("is nested too deeply"));
  EXPECT_THAT(reading_error(folder / "overlap"), HasSubstr("its table of contents is damaged"));
  EXPECT_THAT(reading_error(folder / "deep"), HasSubstr("it holds no dictionary"));
  EXPECT_THAT(reading_error(folder / "types"), HasSubstr("storage 0 has two types"));
}

constexpr const char* kPythonReads = R"(
import json, struct, sys, torch
folder = sys.argv[1]
net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Linear(4, 2))
def check(state):
    net.load_state_dict(state, strict=True)
    assert list(state) == list(net.state_dict()), list(state)
    for tensor in net.state_dict().values():
        if tensor.dim():
            assert torch.equal(tensor, torch.arange(tensor.numel()).reshape(tensor.shape) / 4)
for name in ("a.pth", "a.pt", "a.bin"):
    check(torch.load(f"{folder}/{name}", weights_only=True))
with open(f"{folder}/a.safetensors", "rb") as file:
    size = struct.unpack("<Q", file.read(8))[0]
    assert size % 8 == 0
    header, data = json.loads(file.read(size)), bytearray(file.read())
assert header.pop("__metadata__") == {"format": "pt"}
types = {"F32": torch.float32, "I64": torch.int64}
check({name: torch.frombuffer(data[slice(*entry["data_offsets"])], dtype=types[entry["dtype"]]).reshape(entry["shape"])
       for name, entry in header.items()})
print("good")
)";

TEST(WeightsTest, PythonReadsWhatIsWritten) {
  SYNCBN_SKIP_UNLESS(test::python_has_torch(), "python-torch");
  const test::TempFolder folder;
  auto net = network();
  const at::NoGradGuard no_grad;
  for (const auto& item : state_dict(*net)) {
    if (item.value().dim() > 0) item.value().copy_(ramp(item.value().sizes()));
  }
  for (const char* name : {"a.pth", "a.pt", "a.bin", "a.safetensors"}) {
    write_state_dict(folder / name, *net);
    auto other = network();
    const LoadReport report = load_state_dict(*other, read_state_dict(folder / name));
    EXPECT_THAT(report.loaded, SizeIs(9));
    for (const auto& item : state_dict(*net)) {
      EXPECT_TRUE(at::equal(item.value(), state_dict(*other)[item.key()])) << item.key();
    }
  }
  const auto read = test::run_program({test::python(), "-c", kPythonReads, folder.path().string()});
  EXPECT_EQ(read.out, "good\n") << read.err;
  EXPECT_THAT(error_of([&] { write_state_dict(folder / "a.h5", *net); }),
              HasSubstr("written as .pth, .pt, .bin or .safetensors"));
}

TEST(WeightsTest, WhatDoesNotFitIsListedTogether) {
  auto net = network();
  StateDict weights;
  for (const auto& item : state_dict(*network())) {
    if (item.key() != "0.bias" && item.key() != "1.num_batches_tracked") {
      weights.insert(item.key(), item.value().clone());
    }
  }
  weights["2.weight"] = at::zeros({5, 4});
  weights.insert("3.weight", at::zeros({1}));
  const StateDict before = state_dict(*net);
  const at::Tensor conv = before["0.weight"].clone();
  EXPECT_EQ(error_of([&] { load_state_dict(*net, weights); }),
            "the weights do not fit the network:\n  missing: 0.bias\n  unexpected: 3.weight\n"
            "  of another shape: 2.weight ([5, 4], the network has [2, 4])");
  EXPECT_TRUE(at::equal(before["0.weight"], conv)) << "nothing is loaded in part";
  EXPECT_THAT(error_of([&] { load_state_dict(*net, weights, {.strict = false}); }),
              AllOf(HasSubstr("of another shape: 2.weight"), Not(HasSubstr("missing"))));
  EXPECT_EQ(error_of([&] { load_state_dict(*net, weights, {.skip = {"fc.*"}}); }),
            "no parameter or buffer matches 'fc.*', which is to be left out");
  const LoadReport report = load_state_dict(*net, weights, {.skip = {"2.*"}, .strict = false});
  EXPECT_THAT(report.skipped, ElementsAre("2.weight", "2.bias"));
  EXPECT_THAT(report.missing, ElementsAre("0.bias"));
  EXPECT_THAT(report.unexpected, ElementsAre("3.weight"));
  EXPECT_TRUE(at::equal(state_dict(*net)["0.weight"], weights["0.weight"]));
}

std::string safetensors(const std::string& header, const std::string& data) {
  const uint64_t size = header.size();
  std::string bytes(sizeof size, '\0');
  std::memcpy(bytes.data(), &size, sizeof size);
  return bytes + header + data;
}

TEST(SafetensorsTest, AreReadWithAllTypes) {
  const test::TempFolder folder;
  const std::string header =
      R"({"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
      R"("a":{"dtype":"BF16","shape":[],"data_offsets":[8,10]},)"
      R"("c":{"dtype":"F32","shape":[0,3],"data_offsets":[10,10]},)"
      R"("d":{"dtype":"F64","shape":[1,1],"data_offsets":[10,18]}} )";
  const float values[] = {1.5F, -2};
  const double one = 1;
  std::string data(reinterpret_cast<const char*>(values), sizeof values);
  data += std::string("\x80\x3f", 2) + std::string(reinterpret_cast<const char*>(&one), sizeof one);
  base::write_file_atomically(folder / "a.safetensors", safetensors(header, data));
  StateDict all = read_state_dict(folder / "a.safetensors");
  EXPECT_THAT(all.keys(), ElementsAre("b", "a", "c", "d")) << "in the order of the data";
  EXPECT_TRUE(at::equal(all["b"], at::tensor({1.5F, -2.0F})));
  EXPECT_EQ(all["a"].item<float>(), 1);
  EXPECT_EQ(all["c"].sizes(), at::IntArrayRef({0, 3}));
  EXPECT_TRUE(at::equal(all["d"], at::ones({1, 1}, at::kDouble))) << "not aligned in the file";
  EXPECT_THAT(reading_error(folder / "a.safetensors", "ema"), HasSubstr("no key 'ema'"));
}

TEST(SafetensorsTest, MistakesAreNamed) {
  const test::TempFolder folder;
  const auto entry = [](const std::string& name, const std::string& type, const std::string& shape,
                        const std::string& offsets) {
    return fmt::format(R"("{}":{{"dtype":"{}","shape":{},"data_offsets":{}}})", name, type, shape,
                       offsets);
  };
  const auto error = [&](const std::string& entries, size_t bytes) {
    base::write_file_atomically(folder / "x",
                                safetensors("{" + entries + "}", std::string(bytes, '\0')));
    return reading_error(folder / "x");
  };
  EXPECT_THAT(error(entry("a", "F32", "[2]", "[0,8]") + "," + entry("b", "F32", "[1]", "[4,8]"), 8),
              HasSubstr("its tensors overlap, or leave holes"));
  EXPECT_THAT(error(entry("a", "F32", "[2]", "[4,12]"), 12), HasSubstr("leave holes"));
  EXPECT_THAT(error(entry("a", "F32", "[2]", "[0,8]"), 4),
              HasSubstr("it has 4 bytes of data and describes 8; it is probably truncated"));
  EXPECT_THAT(error(entry("a", "F32", "[3]", "[0,8]"), 8), HasSubstr("the data_offsets of its"));
  EXPECT_THAT(error(entry("a", "F32", "[4611686018427387904,8]", "[0,8]"), 8),
              HasSubstr("the shape of its tensor 'a'"));
  EXPECT_THAT(error(entry("a", "F32", "[-1]", "[0,8]"), 8), HasSubstr("the shape of"));
  EXPECT_THAT(error(entry("a", "F8_E4M3", "[8]", "[0,8]"), 8),
              HasSubstr("has the type F8_E4M3, which is not supported"));
  EXPECT_THAT(error(entry("a", "F32", "[0,4611686018427387904,4611686018427387904]", "[0,0]"), 0),
              HasSubstr("the shape of"));
  EXPECT_THAT(error(R"("a":3)", 0), HasSubstr("the entry of its tensor 'a'"));
  const std::string empty = entry("a", "F32", "[0]", "[0,0]");
  EXPECT_THAT(error(empty + "," + empty, 0), HasSubstr("it has two tensors 'a'"));
  EXPECT_THAT(error(R"("a":{"shape":[[2]]})", 0), HasSubstr("its header is nested deeper than"));
  std::string sizes = "1";
  for (int i = 0; i < 200; ++i) sizes += ",1";
  EXPECT_THAT(error(entry("a", "F32", "[" + sizes + "]", "[0,4]"), 4),
              HasSubstr("the entry of its tensor 'a' is too long"));
  base::write_file_atomically(folder / "y", std::string("\xff\xff\xff\xff\0\0\0\0{", 9));
  EXPECT_THAT(reading_error(folder / "y"), HasSubstr("its header has 4294967295 bytes"));
  base::write_file_atomically(folder / "z", safetensors("{nonsense", ""));
  EXPECT_THAT(reading_error(folder / "z"), HasSubstr("its header is not JSON"));
}

}  // namespace
}  // namespace syncbn::models
