#include <syncbn/dist/sync_batch_norm.h>

#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/passes/inliner.h>
#include <torch/library.h>

#include "batch_norm/convert.h"
#include "ddp/script_module.h"

namespace syncbn::dist {
namespace {

// TorchScript's executor differentiates aten::batch_norm by itself from the second run on, past any
// override in the dispatcher. An operator that it does not know stays as it is.
c10::Symbol plain_symbol() {
  return c10::Symbol::fromQualString("aten::batch_norm");
}
c10::Symbol sync_symbol() {
  return c10::Symbol::fromQualString("syncbn::batch_norm");
}

void define_operator() {
  static auto* const library = [] {
    auto* made =
        new torch::Library(torch::Library::DEF, "syncbn", std::nullopt, __FILE__, __LINE__);
    made->def(
        "batch_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor? running_mean, "
        "Tensor? running_var, bool training, float momentum, float eps, bool cudnn_enabled) -> "
        "Tensor",
        &detail::batch_norm_or_sync);
    return made;
  }();
  (void)library;
}

void replace_nodes(torch::jit::Block* block, c10::Symbol from, c10::Symbol to) {
  for (auto it = block->nodes().begin(); it != block->nodes().end();) {
    torch::jit::Node* node = *it;
    ++it;
    for (torch::jit::Block* inner : node->blocks()) replace_nodes(inner, from, to);
    if (node->kind() != from) continue;
    node->replaceWithNewSymbol(to);
    node->destroy();
  }
}

/// Rewrites all methods in a copy of the module's type, and makes `module` that copy: the executor
/// keeps plans of graphs that already ran. Parameters and buffers stay the same tensors.
void rewrite(torch::jit::Module& module, c10::Symbol from, c10::Symbol to) {
  torch::jit::Module copy = module.clone(/*inplace=*/true);
  for (const torch::jit::Method& method : copy.get_methods()) {
    const auto graph = method.graph();
    torch::jit::Inline(*graph);
    replace_nodes(graph->block(), from, to);
  }
  module = copy;
}

bool is_batch_norm(const torch::jit::Module& module) {
  return detail::class_of(module).find("BatchNorm") != std::string::npos;
}

}  // namespace

ConvertReport convert_sync_batchnorm(torch::jit::Module& module, const ProcessGroupPtr& group) {
  define_operator();
  rewrite(module, plain_symbol(), sync_symbol());
  ConvertReport report;
  for (const auto& [name, layer] : module.named_modules()) {
    if (!is_batch_norm(layer)) continue;
    const at::Tensor key = detail::layer_key(detail::tensor_attribute(layer, "running_mean"),
                                             detail::tensor_attribute(layer, "weight"));
    if (!key.defined()) {
      report.not_converted.push_back(
          {name, "it has neither running statistics nor a weight to be recognised by"});
      continue;
    }
    // Weak: the registry must not keep the layer alive.
    c10::weak_intrusive_ptr<c10::ivalue::Object> weak(layer._ivalue());
    detail::register_layer(key, group, [weak] {
      const auto object = weak.lock();
      return !object || torch::jit::Module(object).is_training();
    });
    report.converted.push_back(name);
  }
  return report;
}

void revert_sync_batchnorm(torch::jit::Module& module) {
  for (const torch::jit::Module& layer : module.modules()) {
    if (!is_batch_norm(layer)) continue;
    const at::Tensor key = detail::layer_key(detail::tensor_attribute(layer, "running_mean"),
                                             detail::tensor_attribute(layer, "weight"));
    if (key.defined()) detail::unregister_layer(key);
  }
  rewrite(module, sync_symbol(), plain_symbol());
}

}  // namespace syncbn::dist
