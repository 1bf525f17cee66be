#include "script_model.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <syncbn/base/error.h>
#include <syncbn/base/log.h>
#include <syncbn/dist/plain_message.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/dist/sync_batch_norm.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/passes/inliner.h>
#include <torch/csrc/jit/serialization/import.h>

#include <algorithm>
#include <memory>

#include "blocks.h"
#include "families.h"
#include "weights/mapped_file.h"
#include "weights/zip_archive.h"

namespace syncbn::models {
namespace {

void set_training(torch::jit::Module& script, bool on) {
  if (script.hasattr("training")) script.setattr("training", on);
}

void register_state(torch::nn::Module& module, const torch::jit::Module& script);

/// A submodule of a TorchScript module.
class ScriptLayer : public torch::nn::Module {
 public:
  explicit ScriptLayer(torch::jit::Module script) : script_(std::move(script)) {
    register_state(*this, script_);
  }

  void train(bool on = true) override {
    Module::train(on);
    set_training(script_, on);
  }

 private:
  torch::jit::Module script_;
};

/// Registers the tensors themselves, not copies.
void register_state(torch::nn::Module& module, const torch::jit::Module& script) {
  for (const auto& item : script.named_parameters(/*recurse=*/false)) {
    module.register_parameter(item.name, item.value, item.value.requires_grad());
  }
  for (const auto& item : script.named_buffers(/*recurse=*/false)) {
    module.register_buffer(item.name, item.value);
  }
  for (const auto& item : script.named_children()) {
    module.register_module(item.name, std::make_shared<ScriptLayer>(item.value));
  }
}

/// The last line of TorchScript's message, after the lines of code that it ran.
std::string reason(const std::exception& error) {
  std::string text = dist::plain_message(error);
  while (text.ends_with('\n')) text.pop_back();
  return text.substr(text.rfind('\n') + 1);
}

torch::jit::Module read_script(const std::string& path) {
  const auto file = detail::MappedFile::open(path);
  const bool is_zip = detail::ZipArchive::begins(file->bytes());
  if (!is_zip || !detail::ZipArchive(file->bytes()).has("constants.pkl")) {
    throw base::UserError("it is not TorchScript; in Python, torch.jit.script(model).save(file)");
  }
  try {
    return torch::jit::load(path, at::kCPU);
  } catch (const std::exception& error) {
    throw base::UserError(fmt::format("TorchScript cannot read it: {}", reason(error)));
  }
}

/// Whether a call of batch_norm is always in evaluation mode, as in a traced network.
bool has_fixed_norm(const torch::jit::Block* block) {
  return std::ranges::any_of(block->nodes(), [](const torch::jit::Node* node) {
    constexpr size_t kTraining = 5;
    if (std::ranges::any_of(node->blocks(), has_fixed_norm)) return true;
    if (node->kind() != c10::aten::batch_norm) return false;
    const auto training = torch::jit::toIValue(node->input(kTraining));
    return training && !training->toBool();
  });
}

void check_trainable(const torch::jit::Module& script) {
  bool has_trainable = false;
  for (const at::Tensor& one : script.parameters()) has_trainable |= one.requires_grad();
  if (!has_trainable) {
    throw base::UserError(
        "it has no parameters to train, as after torch.jit.freeze(); save what torch.jit.script() "
        "returns");
  }
  const auto graph = script.get_method("forward").graph()->copy();
  torch::jit::Inline(*graph);
  if (has_fixed_norm(graph->block())) {
    throw base::UserError(
        "its batch norm stays in evaluation mode, because the network was traced; use "
        "torch.jit.script() instead of torch.jit.trace()");
  }
}

/// The logits for two black images.
at::Tensor example_logits(torch::jit::Module& script, const ModelArgs& args) {
  std::vector<int64_t> shape = args.sample_shape;
  shape.insert(shape.begin(), 2);
  const at::NoGradGuard no_grad;
  script.eval();
  std::vector<at::Tensor> outputs;
  try {
    outputs = tensors_in(script.forward({at::zeros(shape)}));
  } catch (const std::exception& error) {
    throw base::UserError(fmt::format("it does not take images of the shape [{}]: {}",
                                      fmt::join(args.sample_shape, ", "), reason(error)));
  }
  if (outputs.empty()) throw base::UserError("its forward() returns no tensor");
  return outputs.front();
}

/// Whether there are logits for each pixel. @throws base::UserError for another shape
bool check_logits(const at::Tensor& logits, const ModelArgs& args) {
  const bool is_of_pixels = logits.dim() == 4;
  std::vector<int64_t> expected = {2, args.num_classes};
  if (is_of_pixels) {
    expected.insert(expected.end(), args.sample_shape.begin() + 1, args.sample_shape.end());
  }
  if (logits.sizes() == expected) return is_of_pixels;
  throw base::UserError(fmt::format(
      "its output for two images has the shape [{}], and the data with {} classes needs [{}]; "
      "change its last layer in Python",
      fmt::join(logits.sizes(), ", "), args.num_classes, fmt::join(expected, ", ")));
}

void synchronise(torch::jit::Module& script, const ModelArgs& args) {
  const auto report = dist::convert_sync_batchnorm(script, args.norm_group, args.norm_timeout);
  if (dist::is_initialized() && dist::rank() != 0) return;  // rank 0 warns
  for (const auto& [name, why] : report.not_converted) {
    spdlog::warn("model torchscript: {}: {}", name.empty() ? "batch norm" : name, why);
  }
}

void collect_tensors(const c10::IValue& value, std::vector<at::Tensor>& found) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) found.push_back(value.toTensor());
  } else if (value.isTuple()) {
    for (const c10::IValue& item : value.toTupleRef().elements()) collect_tensors(item, found);
  } else if (value.isList() || value.isTensorList()) {
    for (const c10::IValue& item : value.toListRef()) collect_tensors(item, found);
  } else if (value.isGenericDict()) {
    for (const auto& item : value.toGenericDict()) collect_tensors(item.value(), found);
  }
}

/// Options of `model: {type: torchscript}`.
struct ScriptOptions {
  std::string file;

  static void describe(config::Schema<ScriptOptions>& schema) {
    schema
        .field("file", &ScriptOptions::file, "what torch.jit.script(model).save(file) has written")
        .required();
  }
};

/// Reads the file, checks that the network takes the samples and has an output for each class, and
/// converts its batch norm for Norm::kSync.
/// @throws base::UserError naming the file and what is wrong with it
std::shared_ptr<Model> script_model(const ScriptOptions& options, const ModelArgs& args) {
  refuse_recomputation("torchscript", args);
  image_channels("torchscript", args, 1);
  try {
    torch::jit::Module script = read_script(options.file);
    check_trainable(script);
    const bool labels_pixels = check_logits(example_logits(script, args), args);
    if (args.norm == Norm::kSync) synchronise(script, args);
    return std::make_shared<ScriptModel>(std::move(script), labels_pixels);
  } catch (const base::UserError& error) {
    throw base::UserError(fmt::format("model torchscript: {}: {}", options.file, error.what()));
  }
}

}  // namespace

ScriptModel::ScriptModel(torch::jit::Module script, bool labels_pixels)
    : script_(std::move(script)), labels_pixels_(labels_pixels) {
  register_state(*this, script_);
  ScriptModel::train();
  // Not by cloneable(), which would call deepcopy() for the first network as well.
  make_another_ = [script = script_, labels_pixels] {
    return std::make_shared<ScriptModel>(script.deepcopy(), labels_pixels);
  };
}

std::vector<at::Tensor> ScriptModel::forward_all(at::Tensor input) {
  auto outputs = tensors_in(dist::forward_converted(script_, {std::move(input)}));
  if (!is_training()) outputs.resize(1);
  return outputs;
}

void ScriptModel::train(bool on) {
  Module::train(on);
  set_training(script_, on);
}

void add_scripts(ModelKind::Registry& registry) {
  registry.add<ScriptOptions>("torchscript", "a network that Python has scripted, from a file",
                              script_model);
}

std::vector<at::Tensor> tensors_in(const c10::IValue& value) {
  std::vector<at::Tensor> found;
  collect_tensors(value, found);
  return found;
}

}  // namespace syncbn::models
