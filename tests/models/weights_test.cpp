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
#include <tuple>
#include <utility>
#include <vector>

#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <syncbn/models/model.h>
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
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::Pair;
using ::testing::SizeIs;

std::string error_of(const std::function<void()>& work) {
  return test::message_of<base::UserError>(work);
}

std::string reading_error(const std::string& path, const std::string& key = "") {
  return error_of([&] { read_state_dict(path, key); });
}

/// Writes one state in all the forms that are in use.
constexpr const char* kPythonSaves = R"(
import argparse, collections, pathlib, sys, zipfile
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
torch.save(net, f"{folder}/whole.legacy.pth", _use_new_zipfile_serialization=False)
torch.save({"epoch": 3, "model": net}, f"{folder}/object.pth")
torch.save({"args": argparse.Namespace(path=pathlib.Path("a")), "path": pathlib.Path("b"), "best": net, "model": {"net": net}},
           f"{folder}/objects_below.pth")
torch.save({"epoch": 3, "args": argparse.Namespace(path=pathlib.Path("a")), "state": {"epoch": 3, "model": net}}, f"{folder}/below.pth")
with zipfile.ZipFile(f"{folder}/imagenet.pth") as whole, zipfile.ZipFile(f"{folder}/packed.pth", "w", zipfile.ZIP_DEFLATED) as packed:
    for entry in whole.namelist():
        packed.writestr(entry, whole.read(entry))
torch.load(f"{folder}/packed.pth", weights_only=True)
torch.save({"epoch": 3, "net_state": state}, f"{folder}/other_key.pth")
torch.save({"student": state, "teacher": state}, f"{folder}/two.pth")
torch.save({"model": {"net": state, "lr": 0.1}}, f"{folder}/nested.pth")
torch.save({"model": {"net": state}, "ema": {"net": state}}, f"{folder}/nested_two.pth")
)";

/// Writes what torch.load(weights_only=True) reads, and refuses, besides a network.
constexpr const char* kPythonSavesMore = R"(
import collections, dataclasses, datetime, enum, functools, pathlib, sys, warnings
import torch
warnings.simplefilter("ignore")
folder = sys.argv[1]
ramp = torch.arange(4.) / 4
net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Linear(4, 2))
with torch.no_grad():
    for tensor in net.state_dict().values():
        tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) / 4 if tensor.dim() else torch.tensor(7))
state = dict(net.state_dict())
tagged, parameter = ramp.clone(), torch.nn.Parameter(ramp)
tagged.tag = parameter.tag = "a"
good = {"tagged": tagged, "parameter": parameter, "buffer": torch.nn.Buffer(ramp)}
new = {"u16": torch.arange(4).to(torch.uint16), "u64": torch.arange(4).to(torch.uint64), "f8": ramp.to(torch.float8_e4m3fn)}
unread = {"sparse": torch.eye(2).to_sparse(), "csr": torch.eye(2).to_sparse_csr(), "meta": torch.empty(2, device="meta"),
          "quantized": torch.quantize_per_tensor(ramp, 0.5, 1, torch.quint8), "channels":
          torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.qint8)}
new_unread = {"nested": torch.nested.nested_tensor([ramp, ramp[:2]]), "bits": torch.zeros(2, dtype=torch.uint8).view(torch.bits8)}
beside = {"raw": b"\x00\xff", "array": bytearray(b"ab"), "complex": 1 + 2j, "set": {1, 2}, "empty": set(), "size": torch.Size([1, 2]),
          "device": torch.device("cpu"), "dtype": torch.bfloat16, "counter": collections.Counter("aab"), "big": 2**70,
          "losses": [i / 7 for i in range(1_100_000)], "none": [None] * 1_100_000, "pairs": [(i, i) for i in range(100_000)],
          "image": bytes(17_000_000)}
legacy = {"_use_new_zipfile_serialization": False}
for name, weights, options in [("legal.pth", good | new | unread | new_unread, {}), ("legal.legacy.pth", good | unread, legacy)]:
    torch.save(beside | {"state_dict": state | weights}, f"{folder}/{name}", **options)
    torch.load(f"{folder}/{name}", weights_only=True)

class Mine(list): pass
class Table(dict): pass
Point = collections.namedtuple("Point", "x y")
Colour = enum.Enum("Colour", "RED BLUE")
@dataclasses.dataclass
class Options:
    rate: float = 0.1
    path: object = pathlib.Path("a")
objects = {"path": pathlib.Path("a/b"), "list": Mine([1, 2]), "table": Table(a=1), "point": Point(1, 2), "colour": Colour.RED,
           "options": Options(), "day": datetime.date(2024, 1, 1), "function": len, "class": Mine, "partial": functools.partial(int, base=2),
           "frozen": frozenset({1}), "queue": collections.deque([1]), "default": collections.defaultdict(list, a=[1]), "range": range(3),
           "module": torch.nn.Linear(2, 1), "device_type": torch.strided}
try:
    import numpy
    objects |= {"scalar": numpy.float64(0.5), "array": numpy.ones(3)}
except ImportError:
    pass
for name, options in [("objects.pth", {}), ("objects.legacy.pth", legacy), ("objects.protocol4.pth", {"pickle_protocol": 4}),
                      ("objects.protocol5.pth", {"pickle_protocol": 5})]:
    torch.save(objects | {"state_dict": state | {"extra": objects}}, f"{folder}/{name}", **options)
torch.save(state | {"0.bias": pathlib.Path("a")}, f"{folder}/wanted.pth")
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
      for (const char* script : {kPythonSaves, kPythonSavesMore}) {
        const auto made = test::run_program({test::python(), "-c", script, path});
        EXPECT_EQ(made.exit_code, 0) << made.err;
      }
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
  expect_state(read_state_dict(file("packed.pth")), "entries are deflated");
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
  const Dict evil = read_torch_values(file("evil.pth")).toGenericDict();
  EXPECT_EQ(evil.at("evil").toTupleRef().elements()[0].toStringRef(), "posix.system");
}

TEST_F(PythonWeightsTest, WhatWeightsOnlyReadsIsRead) {
  for (const char* name : {"legal.pth", "legal.legacy.pth"}) {
    StateDict weights = read_state_dict(file(name));
    const bool is_new = weights.contains("u16");
    EXPECT_EQ(is_new, name == std::string("legal.pth"));
    for (const char* key : {"tagged", "parameter", "buffer"}) {
      EXPECT_TRUE(at::equal(weights[key], ramp({4}))) << key;
    }
    EXPECT_EQ(weights.unread["sparse"], "torch._utils._rebuild_sparse_tensor");
    EXPECT_EQ(weights.unread["meta"], "torch._utils._rebuild_meta_tensor_no_storage");
    for (const char* key : {"csr", "quantized", "channels"}) {
      EXPECT_TRUE(weights.unread.contains(key)) << key;
    }
    LoadOptions options{.ignore = {"tagged", "parameter", "buffer"}};
    if (is_new) {
      options.ignore.insert(options.ignore.end(), {"u16", "u64", "f8"});
      EXPECT_TRUE(at::equal(weights["u16"].to(at::kFloat), 4 * ramp({4})));
      EXPECT_TRUE(at::equal(weights["u64"].to(at::kFloat), 4 * ramp({4})));
      EXPECT_TRUE(at::equal(weights["f8"].to(at::kFloat), ramp({4})));
      EXPECT_EQ(weights.unread["bits"], "torch.bits8");
      EXPECT_TRUE(weights.unread.contains("nested"));
    }
    EXPECT_THAT(load_state_dict(*network(), weights, options).loaded, SizeIs(9)) << name;
  }
}

TEST_F(PythonWeightsTest, ObjectsBesideTheWeightsAreNotRead) {
  for (const char* format : {".pth", ".legacy.pth", ".protocol4.pth", ".protocol5.pth"}) {
    const std::string path = file(std::string("objects") + format);
    expect_state(read_state_dict(path), path);
    const Dict values = read_torch_values(path).toGenericDict();
    const auto object = [&](const char* key) {
      return values.at(key).toTupleRef().elements()[0].toStringRef();
    };
    EXPECT_THAT(object("path"), HasSubstr("PosixPath"));
    EXPECT_EQ(object("options"), "__main__.Options");
    EXPECT_EQ(object("list"), "__main__.Mine");
  }
  EXPECT_THAT(
      error_of([&] { load_state_dict(*network(), read_state_dict(file("wanted.pth"))); }),
      ContainsRegex("the weights do not fit the network:\n  of a type that is not read: 0.bias "
                    "\\(pathlib[a-z._]*.PosixPath\\)$"));
}

TEST_F(PythonWeightsTest, NothingInThemIsExecuted) {
  expect_state(read_state_dict(file("evil.pth")), "evil");
  read_torch_values(file("evil.pth"));
  EXPECT_FALSE(fs::exists(made_.parent_path() / "executed"));
  EXPECT_THAT(reading_error(file("evil.pth"), "evil"),
              HasSubstr("'evil' is the Python object posix.system, which is not read (nothing was "
                        "executed); in Python, torch.save(model.state_dict(), …)"));
  for (const char* name : {"whole.pth", "whole.legacy.pth"}) {
    EXPECT_THAT(reading_error(file(name)),
                HasSubstr("it holds the Python object torch.nn.modules.container.Sequential, which "
                          "is not read"));
  }
  EXPECT_THAT(reading_error(file("object.pth")),
              HasSubstr("its keys are epoch, model; 'model' is the Python object torch.nn."));
  for (const auto& [name, key, what] :
       std::vector<std::tuple<const char*, const char*, const char*>>{
           {"objects_below.pth", "", "; 'model.net' is the Python object torch.nn."},
           {"objects_below.pth", "best", "; 'best' is the Python object torch.nn."},
           {"objects_below.pth", "other", "; 'path' is the Python object pathlib"},
           {"below.pth", "", "; 'state.model' is the Python object torch.nn."}}) {
    EXPECT_THAT(reading_error(file(name), key), HasSubstr(what)) << name << " " << key;
  }
}

TEST_F(PythonWeightsTest, TheOnlyNetworkOfAFileIsTaken) {
  expect_state(read_state_dict(file("other_key.pth")), "other_key");
  EXPECT_THAT(reading_error(file("two.pth")),
              HasSubstr("name one of its networks (init_key): student, teacher"));
  expect_state(read_state_dict(file("two.pth"), "teacher"), "teacher");
  expect_state(read_state_dict(file("nested.pth")), "nested");
  EXPECT_THAT(reading_error(file("nested_two.pth")),
              HasSubstr("name one of its networks (init_key): model.net, ema.net"));
  expect_state(read_state_dict(file("nested_two.pth"), "ema.net"), "nested_two");
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
  const std::pair<std::string, const char*> others[] = {
      {"epochs: 3\n", "it is neither a file of torch.save nor safetensors"},
      {"{\"epochs\": 3}", "it is JSON, such as the index of weights in several files"},
      {"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
       "it is a pointer of Git LFS, not the file: fetch it with `git lfs pull`"},
      {"<!DOCTYPE html>\n<html>", "it is HTML, SVG or other XML"},
      {"\xef\xbb\xbf\n <?xml version=\"1.0\"?><Error>", "it is HTML, SVG or other XML"},
      {R"({"metadata": {"total_size": 1}, "weight_map": {"a": "b.safetensors"}})",
       "it is JSON, such as the index of weights in several files: name their file"},
      {"\x1f\x8b\x08", "it is a compressed file: unpack it with `gzip -dc"},
      {"\x89HDF\r\n", "it is a file of HDF5"},
      {"\x80\x04N.", "it is a pickle, but none of torch.save"},
  };
  for (const auto& [bytes, what] : others) {
    base::write_file_atomically(folder_ / "other.pth", bytes);
    EXPECT_THAT(reading_error(folder_ / "other.pth"), HasSubstr(what));
  }
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
  std::string packed = base::read_file(file("packed.pth"));
  packed[packed.find("data.pkl") + 100] ^= 1;
  write(folder_ / "packed.pth", packed);
  EXPECT_THAT(reading_error(folder_ / "packed.pth"),
              ContainsRegex("its entry 'data.pkl' is damaged(, or|: the checksum is wrong)"));
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
# A function with a name of 100 kB, and as many objects that it makes.
archive("objects", b"\x80\x02" + b"ca\n" + b"x" * 100000 + b"\nq\x010" + b"h\x01)R0" * 200000 + b"}.")
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
with zipfile.ZipFile(f"{folder}/bzip2", "w", zipfile.ZIP_BZIP2) as file:
    file.writestr("archive/data.pkl", b"\x80\x02}." + b"\0" * 1000)
# A deflated entry that says to have 2 GiB.
with zipfile.ZipFile(f"{folder}/claim", "w", zipfile.ZIP_DEFLATED) as file:
    file.writestr("archive/data.pkl", b"\x80\x02}.")
    file.filelist[0].file_size = 1 << 31
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
  for (const char* name : {"copies", "objects", "attributes", "huge"}) {
    EXPECT_THAT(reading_error(folder / name), HasSubstr("would take too much memory")) << name;
  }
  EXPECT_THAT(reading_error(folder / "marks"), HasSubstr("is nested too deeply"));
  EXPECT_THAT(reading_error(folder / "overlap"), HasSubstr("its table of contents is damaged"));
  for (const char* name : {"deep", "memo", "gets"}) {
    EXPECT_THAT(reading_error(folder / name), HasSubstr("it holds no dictionary")) << name;
  }
  EXPECT_THAT(reading_error(folder / "bzip2"),
              HasSubstr("'data.pkl' is damaged, or compressed by another method than deflate"));
  EXPECT_THAT(reading_error(folder / "claim"), HasSubstr("'data.pkl' is damaged, or compressed"));
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
            "no tensor in the network or the file matches 'fc.*', which is to be left out");
  const LoadReport report = load_state_dict(*net, weights, {.skip = {"2.*"}, .strict = false});
  EXPECT_THAT(report.skipped, ElementsAre("2.weight", "2.bias"));
  EXPECT_THAT(report.missing, ElementsAre("0.bias"));
  EXPECT_THAT(report.unexpected, ElementsAre("3.weight"));
  EXPECT_TRUE(at::equal(state_dict(*net)["0.weight"], weights["0.weight"]));
}

/// The state of a network under other names.
StateDict renamed(const torch::nn::Sequential& net,
                  const std::function<std::string(const std::string&)>& name_of) {
  StateDict all;
  for (const auto& item : state_dict(*net)) all.insert(name_of(item.key()), item.value());
  return all;
}

TEST(WeightsTest, ThePrefixOfAllNamesIsFound) {
  const auto saved = network();
  const at::Tensor weight = state_dict(*saved)["0.weight"];
  const auto loads = [&](const StateDict& weights, const std::string& prefix,
                         const LoadOptions& options = {}) {
    auto net = network();
    const LoadReport report = load_state_dict(*net, weights, options);
    EXPECT_EQ(report.prefix, prefix);
    EXPECT_TRUE(at::equal(state_dict(*net)["0.weight"], weight)) << prefix;
    return report;
  };
  const auto after = [&](const std::string& prefix) {
    return renamed(saved, [&](const std::string& name) { return prefix + name; });
  };
  for (const auto& [prefix, found] : std::vector<std::pair<std::string, std::string>>{
           {"module.", ""},
           {"_orig_mod.module.", ""},
           {"model.", "model."},
           {"backbone.", "backbone."},
           {"model._orig_mod.", "model."},
           {"module.net._fsdp_wrapped_module.body.", "net.body."}}) {
    StateDict weights = after(prefix);
    weights.insert(prefix + "n_averaged", at::zeros({}));
    loads(weights, found);
    if (found.empty()) continue;
    weights.insert("criterion.weight", at::ones({2}));
    EXPECT_THAT(loads(weights, found).unexpected, ElementsAre("criterion.weight"));
  }
  for (const std::string part : {"_orig_mod.", "module."}) {
    loads(
        renamed(saved,
                [&](const std::string& name) { return name.substr(0, 2) + part + name.substr(2); }),
        "");
  }
  // A network that has such a part itself, and a file with a name twice.
  torch::nn::Module whole;
  whole.register_module("module", network());
  EXPECT_THAT(load_state_dict(whole, after("module.")).loaded, SizeIs(9));
  EXPECT_THAT(load_state_dict(whole, after("module.module.")).loaded, SizeIs(9));
  StateDict twice = after("");
  twice.insert("module.0.weight", weight);
  EXPECT_THAT(error_of([&] { load_state_dict(*network(), twice); }),
              HasSubstr("'0.weight' is there twice"));
}

/// A network with two names that differ in `module.` only, and another name in older versions.
struct Ambiguous : Model {
  Ambiguous() {
    weight = register_parameter("weight", at::zeros({1}));
    const auto part = register_module("module", std::make_shared<torch::nn::Module>());
    below = part->register_parameter("weight", at::zeros({1}));
  }
  at::Tensor forward(at::Tensor input) override { return input; }
  std::string present_name(const std::string& name) const override {
    return name == "old" ? "weight" : name;
  }
  at::Tensor weight, below;
};

/// Tensors with the values 1, 2, and so on.
StateDict numbered(const std::vector<std::string>& names) {
  StateDict all;
  for (const std::string& name : names) {
    all.insert(name, at::full({1}, static_cast<double>(all.size() + 1)));
  }
  return all;
}

TEST(WeightsTest, OfAnotherTypeAreConvertedUnlessThatDropsTheImaginaryPart) {
  const auto load = [](const at::Tensor& weight) {
    StateDict weights = state_dict(*network());
    weights["2.bias"] = weight;
    auto net = network();
    load_state_dict(*net, weights);
    return state_dict(*net)["2.bias"].clone();
  };
  for (const at::ScalarType type : {at::kDouble, at::kHalf, at::kLong, at::kChar, at::kBool}) {
    EXPECT_TRUE(at::equal(load(at::ones({2}, type)), at::ones({2}))) << type;
  }
  EXPECT_EQ(error_of([&] { load(at::ones({2}, at::kComplexFloat)); }),
            "the weights do not fit the network:\n  of a type that is not read: 2.bias "
            "(ComplexFloat, the network has Float)");
}

TEST(WeightsTest, NamesThatDifferInWrappersOnlyAreKept) {
  for (const std::string prefix : {"", "module.", "model."}) {
    Ambiguous net;
    const auto report =
        load_state_dict(net, numbered({prefix + "module.weight", prefix + "weight"}));
    EXPECT_EQ(report.prefix, prefix);
    EXPECT_EQ(net.below.item<float>(), 1) << prefix;
    EXPECT_EQ(net.weight.item<float>(), 2) << prefix;
  }
  Ambiguous net;
  load_state_dict(net, numbered({"weight"}), {.skip = {"module.weight"}});
  EXPECT_EQ(net.weight.item<float>(), 1);
}

TEST(WeightsTest, ThePresentNameComesBeforeAnOlderOne) {
  const auto weight_of = [](const std::vector<std::string>& names) {
    Ambiguous net;
    load_state_dict(net, numbered(names), {.strict = false});
    return net.weight.item<float>();
  };
  EXPECT_EQ(weight_of({"module.weight", "old", "weight"}), 3);
  EXPECT_EQ(weight_of({"module.weight", "weight", "old"}), 2);
  EXPECT_EQ(weight_of({"module.weight", "old"}), 2);
}

TEST(WeightsTest, CountersDoNotChooseAPrefix) {
  const auto saved = network();
  StateDict weights;
  for (const auto& item : state_dict(*saved)) {  // half of the tensors that have values
    if (item.key().starts_with("1.")) continue;
    weights.insert("a." + item.key(), item.value());
    weights.insert("b." + item.key(), item.value());
  }
  weights.insert("b.1.num_batches_tracked", at::zeros({}, at::kLong));
  EXPECT_EQ(
      error_of([&] { load_state_dict(*network(), weights, {.strict = false}); }),
      "the file has the network's weights more than once; choose one prefix:\n  prefixes: a., "
      "b.");
  torch::nn::Module empty;
  EXPECT_THAT(load_state_dict(empty, weights, {.prefix = "c"}).loaded, SizeIs(0));
}

TEST(WeightsTest, OneOfSeveralPrefixesIsChosenByName) {
  const auto saved = network();
  StateDict weights;
  for (const auto& item : state_dict(*saved)) {
    weights.insert("module.encoder_q." + item.key(), item.value());
    weights.insert("module.encoder_k." + item.key(), item.value() + 1);
  }
  weights.insert("module.queue", at::zeros({4}));
  EXPECT_EQ(error_of([&] { load_state_dict(*network(), weights, {.keys = "init_"}); }),
            "the file has the network's weights more than once; choose one prefix:\n  prefixes: "
            "encoder_q., encoder_k.\n  to take the tensors that fit, set init_prefix=encoder_q.");
  for (const LoadOptions& options : std::vector<LoadOptions>{{.prefix = "encoder_q"},
                                                             {.prefix = "module.encoder_q."},
                                                             {.ignore = {"encoder_k"}},
                                                             {.ignore = {"module.encoder_k.*"}}}) {
    auto net = network();
    load_state_dict(*net, weights, options);
    EXPECT_TRUE(at::equal(state_dict(*net)["0.weight"], state_dict(*saved)["0.weight"]));
  }
  EXPECT_THAT(error_of([&] { load_state_dict(*network(), weights, {.prefix = "encoder_x"}); }),
              ::testing::StartsWith(
                  "no name begins with the prefix 'encoder_x.':\n  names: encoder_q.0.weig"));
  // Without any prefix, these fit as well.
  for (const auto& item : state_dict(*saved)) weights.insert(item.key(), item.value());
  EXPECT_THAT(error_of([&] { load_state_dict(*network(), weights, {.keys = "init_"}); }),
              AllOf(HasSubstr("\n  unexpected: encoder_q.0.weight, encoder_k.0.weight, "),
                    HasSubstr(", set init_ignore=[encoder_q,encoder_k,queue]")));
  weights.insert("head.weight", at::zeros({4}));
  EXPECT_THAT(error_of([&] { load_state_dict(*network(), weights, {.prefix = "head"}); }),
              HasSubstr("the weights below 'head.' do not fit the network:\n  missing: 0.weight"));
}

TEST(WeightsTest, TheAdviceForTensorsThatDoNotFitWorks) {
  const auto saved = network();
  const auto advice = [&](const StateDict& weights, LoadOptions options = {}) {
    options.keys = "init_";
    const std::string error = error_of([&] { load_state_dict(*network(), weights, options); });
    return error.substr(error.rfind('\n') + 1);
  };
  const std::string set = "  to take the tensors that fit, set ";
  StateDict weights = renamed(saved, [](const std::string& name) { return "model." + name; });
  weights.insert("model.z", at::zeros({1}));
  EXPECT_EQ(advice(weights), set + "init_ignore=[model.z]");
  EXPECT_NO_THROW(load_state_dict(*network(), weights, LoadOptions{.ignore = {"model.z"}}));
  EXPECT_NO_THROW(load_state_dict(*network(), weights, LoadOptions{.skip = {"z"}}));
  EXPECT_EQ(error_of([&] { load_state_dict(*network(), weights, {.ignore = {"y"}}); }),
            "no tensor in the file matches 'y', which is to be left out");
  // Many tensors: below a name of their own, and below layers that fit.
  StateDict many = renamed(saved, [](const std::string& name) { return "model." + name; });
  for (int i = 0; i < 30; ++i) {
    many.insert(fmt::format("model.decoder.{}.weight", i), at::zeros({1}));
  }
  EXPECT_EQ(advice(many), set + "init_ignore=[model.decoder]");
  EXPECT_NO_THROW(load_state_dict(*network(), many, LoadOptions{.ignore = {"model.decoder"}}));
  StateDict beside = renamed(saved, [](const std::string& name) { return name; });
  for (int i = 0; i < 30; ++i) {
    beside.insert(fmt::format("2.weight.scale{}.a", i), at::zeros({1}));
    beside.insert(fmt::format("2.weight.scale{}.b", i), at::zeros({1}));
  }
  const std::string line = advice(beside);
  const std::string begin = set + "init_ignore=[";
  ASSERT_TRUE(line.starts_with(begin + "2.weight.scale0,2.weight.scale1,")) << line;
  const auto ignore = base::words_of(line.substr(begin.size(), line.size() - begin.size() - 1));
  EXPECT_THAT(ignore, SizeIs(30));
  EXPECT_THAT(load_state_dict(*network(), beside, {.ignore = ignore}).loaded, SizeIs(9));
  // A head with other layers.
  StateDict head;
  for (const auto& item : state_dict(*saved)) {
    const bool is_head = item.key().starts_with("2.");
    head.insert(is_head ? "2.0" + item.key().substr(1) : item.key(), item.value());
  }
  EXPECT_EQ(advice(head), set + "init_skip=[2] init_ignore=[2]");
  EXPECT_NO_THROW(load_state_dict(*network(), head, LoadOptions{.skip = {"2"}}));
  // One tensor of a layer.
  StateDict shape = renamed(saved, [](const std::string& name) { return name; });
  shape["2.weight"] = at::zeros({3, 4});
  EXPECT_EQ(advice(shape, {.skip = {"1"}}), set + "init_skip=[1,2.weight]");
}

TEST(WeightsTest, WhatIsNotReadMattersOnlyIfItIsWanted) {
  StateDict weights;
  for (const auto& item : state_dict(*network())) {
    if (item.key() != "2.bias") weights.insert(item.key(), item.value());
  }
  weights.unread["scales"] = "F4";
  EXPECT_THAT(error_of([&] { load_state_dict(*network(), weights); }),
              HasSubstr("missing: 2.bias"));
  weights.unread["2.bias"] = "F4";
  EXPECT_EQ(error_of([&] { load_state_dict(*network(), weights); }),
            "the weights do not fit the network:\n  of a type that is not read: 2.bias (F4)");
  EXPECT_THAT(load_state_dict(*network(), weights, {.skip = {"2.bias"}}).loaded, SizeIs(8));
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

TEST(SafetensorsTest, TypesThatAreNotReadAreKnownByName) {
  const test::TempFolder folder;
  const std::string header = R"({"a":{"dtype":"F4","shape":[8],"data_offsets":[0,4]},)"
                             R"("b":{"dtype":"U16","shape":[2],"data_offsets":[4,8]},)"
                             R"("c":{"dtype":"F8_E4M3","shape":[1],"data_offsets":[8,9]},)"
                             R"("d":{"dtype":"C64","shape":[1],"data_offsets":[9,17]}})";
  base::write_file_atomically(
      folder / "a",
      safetensors(header, std::string("\0\0\0\0\1\0\xff\xff\x38", 9) + std::string(8, '\0')));
  StateDict all = read_state_dict(folder / "a");
  EXPECT_THAT(all.keys(), ElementsAre("b", "c", "d"));
  EXPECT_THAT(all.unread, ElementsAre(Pair("a", "F4")));
  EXPECT_TRUE(at::equal(all["b"].to(at::kInt), at::tensor({1, 65535}, at::kInt)));
  EXPECT_EQ(all["c"].to(at::kFloat).item<float>(), 1);
  EXPECT_EQ(all["d"].scalar_type(), at::kComplexFloat);
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
