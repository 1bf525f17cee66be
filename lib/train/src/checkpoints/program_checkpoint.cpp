#include <syncbn/train/checkpoint.h>

#include <ATen/EmptyTensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstring>
#include <optional>

#include "checkpoints/sealed_archive.h"
#include "step/model.h"

namespace syncbn::train {
namespace {

constexpr const char* kProgramFormat = "syncbn-program";
constexpr int64_t kProgramVersion = 1;

at::Tensor bytes_of(const torch::optim::Optimizer& optimizer) {
  torch::serialize::OutputArchive archive;
  optimizer.save(archive);
  std::string bytes;
  archive.save_to([&](const void* data, size_t size) {
    bytes.append(static_cast<const char*>(data), size);
    return size;
  });
  at::Tensor tensor = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
  return tensor;
}

/// libtorch's readers do not check whether tensors lie within their data.
void check_tensors(const c10::IValue& values) {
  values.visit([](const c10::IValue& value) {
    if (!value.isTensor() || !value.toTensor().defined()) return false;
    const at::Tensor& tensor = value.toTensor();
    const size_t needed = at::detail::computeStorageNbytes(
        tensor.sizes(), tensor.strides(), tensor.itemsize(), tensor.storage_offset());
    if (needed > tensor.storage().nbytes()) {
      throw base::UserError("it has a tensor that reaches beyond its data");
    }
    return false;
  });
}

void load_optimizer(const at::Tensor& bytes, torch::optim::Optimizer& optimizer) {
  torch::serialize::InputArchive archive;
  archive.load_from(static_cast<const char*>(bytes.const_data_ptr()),
                    static_cast<size_t>(bytes.numel()));
  for (const std::string& key : archive.keys()) {
    c10::IValue values;
    archive.read(key, values);
    check_tensors(values);
  }
  optimizer.load(archive);
}

/// The contents of a file that save_checkpoint() or `train` has written.
std::optional<Dict> read_program_checkpoint(const std::string& bytes) {
  if (!is_sealed(bytes)) return std::nullopt;
  try {
    // With libtorch's reader, which knows every type that `extra` may hold.
    const c10::IValue values = torch::jit::pickle_load({bytes.begin(), bytes.end()});
    check_tensors(values);
    const Dict dict = values.toGenericDict();
    const std::string format = dict.at("format").toStringRef();
    const int64_t version = dict.at("format_version").toInt();
    const bool is_known = (format == kProgramFormat && version == kProgramVersion) ||
                          (format == Checkpoint::kFormat && version == Checkpoint::kFormatVersion);
    return is_known ? std::optional(dict) : std::nullopt;
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

void load_module(const Dict& saved, torch::nn::Module& module, const std::string& path) {
  const at::NoGradGuard no_grad;
  const auto present = state_of(module);
  const auto fail = [&](const std::string& why) {
    throw base::UserError(fmt::format("cannot load {}: {}", path, why));
  };
  for (const auto& [name, tensor] : present) {
    if (!saved.contains(name)) fail(fmt::format("it has no tensor '{}'", name));
    if (saved.at(name).toTensor().sizes() != tensor.sizes()) {
      fail(fmt::format("its tensor '{}' has another shape", name));
    }
  }
  if (saved.size() != present.size()) {
    fail(fmt::format("it has {}, the module {}", base::counted(saved.size(), "tensor"),
                     present.size()));
  }
  for (const auto& [name, tensor] : present) tensor.detach().copy_(saved.at(name).toTensor());
}

}  // namespace

void save_checkpoint(const std::string& path, const torch::nn::Module& module,
                     const torch::optim::Optimizer* optimizer, const Extra& extra) {
  Dict model = make_dict();
  for (const auto& [name, tensor] : state_of(module)) put(model, name, on_host(tensor));
  Dict values = make_dict();
  for (const auto& [name, value] : extra) {
    put(values, name, value.isTensor() ? on_host(value.toTensor()) : value);
  }
  Dict dict = make_dict();
  put(dict, "format", std::string(kProgramFormat));
  put(dict, "format_version", kProgramVersion);
  put(dict, "model", model);
  if (optimizer != nullptr) put(dict, "optimizer", bytes_of(*optimizer));
  put(dict, "extra", values);
  write_sealed_archive(dict, path);
}

Extra load_checkpoint(const std::string& path, torch::nn::Module& module,
                      torch::optim::Optimizer* optimizer) {
  const std::string bytes = base::read_file(path);
  const auto dict = read_program_checkpoint(bytes);
  if (!dict) {
    throw base::UserError(
        fmt::format("{} is not a whole file of save_checkpoint(): {}", path, what_it_is(bytes)));
  }
  const bool is_of_train = !dict->contains("extra");
  if (optimizer != nullptr && (is_of_train || !dict->contains("optimizer"))) {
    throw base::UserError(fmt::format("cannot load {}: {}", path,
                                      is_of_train
                                          ? "the optimizer of a run of train is for train alone"
                                          : "it was saved without an optimizer"));
  }
  load_module(dict->at("model").toGenericDict(), module, path);
  if (optimizer != nullptr) {
    try {
      load_optimizer(dict->at("optimizer").toTensor(), *optimizer);
    } catch (const base::UserError& error) {
      throw base::UserError(fmt::format("cannot load {}: {}", path, error.what()));
    }
  }
  Extra extra;
  if (is_of_train) return extra;
  for (const auto& entry : dict->at("extra").toGenericDict()) {
    extra[entry.key().toStringRef()] = entry.value();
  }
  return extra;
}

}  // namespace syncbn::train
