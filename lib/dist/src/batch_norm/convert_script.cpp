#include <syncbn/dist/sync_batch_norm.h>

#include <string_view>

#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/passes/inliner.h>
#include <torch/library.h>

#include "batch_norm/convert.h"
#include "ddp/script_module.h"

namespace syncbn::dist {
namespace {

/// An operator of TorchScript's and ours that stands for it. Its executor differentiates
/// aten::batch_norm by itself from the second run on, past any override in the dispatcher; an
/// operator that it does not know stays as it is.
struct Replacement {
  const char* plain;
  const char* sync;
};
constexpr Replacement kBatchNorm{"aten::batch_norm", "syncbn::batch_norm"};
/// An exception that is raised where one rank alone has one value per channel: ours does nothing,
/// since syncbn::batch_norm looks at all ranks.
constexpr Replacement kCheck{"prim::RaiseException", "syncbn::raise_on_one_rank"};
constexpr std::string_view kCheckMessage = "Expected more than 1 value per channel when training";

void define_operators() {
  static auto* const library = [] {
    auto* made =
        new torch::Library(torch::Library::DEF, "syncbn", std::nullopt, __FILE__, __LINE__);
    made->def(
        "batch_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor? running_mean, "
        "Tensor? running_var, bool training, float momentum, float eps, bool cudnn_enabled) -> "
        "Tensor",
        &detail::batch_norm_or_sync);
    made->def("raise_on_one_rank(str msg, str? cls=None) -> ()",
              [](const std::string&, const std::optional<std::string>&) {});
    return made;
  }();
  (void)library;
}

/// The text that a string begins with, where the graph says it.
std::string constant_beginning(const torch::jit::Value* value) {
  const torch::jit::Node* node = value->node();
  if (node->kind() == c10::aten::format) return constant_beginning(node->input(0));
  const auto constant = torch::jit::toIValue(value);
  return constant && constant->isString() ? constant->toStringRef() : "";
}

/// Whether this is the exception that kCheck is about.
bool is_check(const torch::jit::Node& node) {
  return node.kind() == c10::prim::RaiseException &&
         constant_beginning(node.input(0)).starts_with(kCheckMessage);
}

enum class Direction { kConvert, kRevert };

/// What stands for a node afterwards; nullopt: it stays.
std::optional<c10::Symbol> replacement(const torch::jit::Node& node, Direction direction) {
  const auto symbol = [](const char* name) { return c10::Symbol::fromQualString(name); };
  for (const Replacement& pair : {kBatchNorm, kCheck}) {
    if (direction == Direction::kRevert) {
      if (node.kind() == symbol(pair.sync)) return symbol(pair.plain);
    } else if (node.kind() == symbol(pair.plain)) {
      if (node.kind() != c10::prim::RaiseException || is_check(node)) return symbol(pair.sync);
    }
  }
  return std::nullopt;
}

void replace_nodes(torch::jit::Block* block, Direction direction) {
  for (auto it = block->nodes().begin(); it != block->nodes().end();) {
    torch::jit::Node* node = *it;
    ++it;
    for (torch::jit::Block* inner : node->blocks()) replace_nodes(inner, direction);
    if (const auto symbol = replacement(*node, direction)) {
      node->replaceWithNewSymbol(*symbol);
      node->destroy();
    }
  }
}

/// Rewrites all methods in a copy of the module's type, and makes `module` that copy: the executor
/// keeps plans of graphs that already ran. Parameters and buffers stay the same tensors.
void rewrite(torch::jit::Module& module, Direction direction) {
  torch::jit::Module copy = module.clone(/*inplace=*/true);
  for (const torch::jit::Method& method : copy.get_methods()) {
    const auto graph = method.graph();
    torch::jit::Inline(*graph);
    replace_nodes(graph->block(), direction);
  }
  module = copy;
}

bool is_batch_norm(const torch::jit::Module& module) {
  return detail::class_of(module).find("BatchNorm") != std::string::npos;
}

struct FoundLayer {
  std::string name;
  torch::jit::Module module;
  at::Tensor running_mean;
  at::Tensor weight;

  at::Tensor key() const { return detail::layer_key(running_mean, weight); }
};

/// All batch-norm layers below a module, itself included.
std::vector<FoundLayer> batch_norm_layers(const torch::jit::Module& module) {
  std::vector<FoundLayer> found;
  for (const auto& [name, layer] : module.named_modules()) {
    if (!is_batch_norm(layer)) continue;
    found.push_back({name, layer, detail::tensor_attribute(layer, "running_mean"),
                     detail::tensor_attribute(layer, "weight")});
  }
  return found;
}

}  // namespace

ConvertReport convert_sync_batchnorm(torch::jit::Module& module, const ProcessGroupPtr& group,
                                     std::optional<std::chrono::milliseconds> sync_timeout) {
  define_operators();
  rewrite(module, Direction::kConvert);
  ConvertReport report;
  for (const FoundLayer& layer : batch_norm_layers(module)) {
    if (!layer.key().defined()) {
      report.not_converted.push_back(
          {layer.name, "it has neither running statistics nor a weight to be recognised by"});
      continue;
    }
    // Weak: the registry must not keep the layer alive.
    const c10::weak_intrusive_ptr<c10::ivalue::Object> weak(layer.module._ivalue());
    const auto is_training = [weak] {
      const auto object = weak.lock();
      return !object || torch::jit::Module(object).is_training();
    };
    const auto counter = [weak] {
      const auto object = weak.lock();
      return object ? detail::tensor_attribute(torch::jit::Module(object), "num_batches_tracked")
                    : at::Tensor();
    };
    detail::register_layer(
        layer.key(), layer.weight,
        {std::make_shared<detail::LayerName>(detail::LayerName{.given = layer.name}), group,
         sync_timeout, is_training, counter});
    report.converted.push_back(layer.name);
  }
  return report;
}

void revert_sync_batchnorm(torch::jit::Module& module) {
  for (const FoundLayer& layer : batch_norm_layers(module)) {
    detail::unregister_layer(layer.key(), layer.weight);
  }
  rewrite(module, Direction::kRevert);
}

}  // namespace syncbn::dist
