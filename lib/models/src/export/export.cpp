#include <syncbn/models/export.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/sin.h>
#include <torch/csrc/jit/serialization/export.h>

#include <array>
#include <map>
#include <nlohmann/json.hpp>

#include <syncbn/base/text.h>
#include <syncbn/models/torch_archive.h>
#include <syncbn/models/weights.h>

#include "export/onnx_export.h"
#include "export/traced_module.h"
#include "weights/safetensors.h"

namespace syncbn::models {
namespace {

using Json = nlohmann::ordered_json;

Json json_of(const ExportInfo& info) {
  std::vector<std::string> classes;
  for (const std::string& name : info.classes) classes.push_back(base::printable(name));
  Json json = {{"classes", classes}, {"mean", info.mean}, {"std", info.std}, {"size", info.size}};
  if (!info.transforms.empty()) json["transforms"] = Json::parse(info.transforms);
  return json;
}

/// The members, each as JSON.
std::map<std::string, std::string> strings_of(const ExportInfo& info) {
  const Json json = json_of(info);
  std::map<std::string, std::string> all;
  for (const auto& [name, value] : json.items()) all[name] = value.dump();
  return all;
}

/// Images that differ from each other.
at::Tensor example_of(const ExportInfo& info) {
  constexpr int64_t kImages = 2;
  std::vector<int64_t> shape = info.size;
  shape.insert(shape.begin(), kImages);
  return at::sin(at::arange(c10::multiply_integers(shape), at::kFloat)).reshape(shape);
}

/// A list without an item type: torch.load(weights_only=True) does not read typed lists.
template <class Item>
c10::IValue list_of(const std::vector<Item>& items) {
  c10::impl::GenericList list(c10::AnyType::get());
  for (const Item& item : items) list.push_back(item);
  return list;
}

void write_torch(const Model& model, const ExportInfo& info, const Sink& sink) {
  Dict tensors = make_dict();
  for (const auto& item : state_dict(model)) put(tensors, item.key(), on_host(item.value()));
  Dict dict = make_dict();
  put(dict, "model", tensors);
  put(dict, "classes", list_of(info.classes));
  put(dict, "mean", list_of(info.mean));
  put(dict, "std", list_of(info.std));
  put(dict, "size", list_of(info.size));
  if (!info.transforms.empty()) put(dict, "transforms", info.transforms);
  write_torch_archive(dict, sink);
}

void write_script(const torch::jit::Module& module, const ExportInfo& info, const Sink& sink) {
  const auto write = [&sink](const void* data, size_t size) {
    sink({static_cast<const char*>(data), size});
    return size;
  };
  torch::jit::ExportModule(module, write, {{"info.json", json_of(info).dump()}});
}

}  // namespace

const std::vector<std::string>& export_formats() {
  static const std::vector<std::string> names = {"torch", "safetensors", "torchscript", "onnx"};
  return names;
}

std::string extension(ExportFormat format) {
  constexpr std::array kExtensions = {".pth", ".safetensors", ".pt", ".onnx"};
  return kExtensions.at(static_cast<size_t>(format));
}

void export_model(const std::string& path, ExportFormat format, Model& model,
                  const ExportInfo& info) {
  const at::NoGradGuard no_grad;
  model.eval();
  if (format == ExportFormat::kTorch) {
    write_parts(path, [&](const Sink& sink) { write_torch(model, info, sink); });
  } else if (format == ExportFormat::kSafetensors) {
    write_parts(path, [&](const Sink& sink) {
      detail::write_safetensors(state_dict(model), sink, strings_of(info));
    });
  } else {
    const at::Tensor example = example_of(info);
    const torch::jit::Module traced = detail::traced_module(model, example);
    if (format == ExportFormat::kTorchScript) {
      write_parts(path, [&](const Sink& sink) { write_script(traced, info, sink); });
    } else {
      const std::string bytes = detail::onnx_bytes(traced, example, strings_of(info));
      write_parts(path, [&](const Sink& sink) { sink(bytes); });
    }
  }
}

}  // namespace syncbn::models
