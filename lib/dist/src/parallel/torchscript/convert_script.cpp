#include <syncbn/dist/sync_batch_norm.h>

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string_view>
#include <unordered_map>
#include <utility>

#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/passes/inliner.h>

#include "batch_norm/convert.h"
#include "torchscript/script_module.h"
#include "transport/timeouts.h"

namespace syncbn::dist {
namespace {

/// An operator of TorchScript and the one that replaces it. From the second run on, TorchScript's
/// executor differentiates aten::batch_norm itself and bypasses overrides in the dispatcher. It
/// does not change operators that it does not know.
struct Replacement {
  const char* plain;
  const char* sync;
};
constexpr Replacement kBatchNorm{"aten::batch_norm", "syncbn::batch_norm"};
/// Raises for one value per channel on this rank. The replacement does nothing: syncbn::batch_norm
/// counts the values of all ranks.
constexpr Replacement kCheck{"prim::RaiseException", "syncbn::raise_on_one_rank"};
constexpr std::string_view kCheckMessage = "Expected more than 1 value per channel when training";

/// The constant text that a string begins with, if the graph contains it.
std::string constant_prefix(const torch::jit::Value* value) {
  const torch::jit::Node* node = value->node();
  if (node->kind() == c10::aten::format) return constant_prefix(node->input(0));
  const auto constant = torch::jit::toIValue(value);
  return constant && constant->isString() ? constant->toStringRef() : "";
}

enum class Direction { kConvert, kRevert };

/// nullopt: the node stays.
std::optional<c10::Symbol> replacement(const torch::jit::Node& node, Direction direction) {
  const auto symbol = [](const char* name) { return c10::Symbol::fromQualString(name); };
  for (const Replacement& pair : {kBatchNorm, kCheck}) {
    const bool reverts = direction == Direction::kRevert;
    if (node.kind() != symbol(reverts ? pair.sync : pair.plain)) continue;
    // Keep all other exceptions.
    if (node.kind() == c10::prim::RaiseException &&
        !constant_prefix(node.input(0)).starts_with(kCheckMessage)) {
      continue;
    }
    return symbol(reverts ? pair.plain : pair.sync);
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

/// "a.b.c" if the value is the attribute c of the module a.b in `self`, else empty.
std::string attribute_path(const torch::jit::Value* value, const torch::jit::Value* self) {
  std::string path;
  while (value != self) {
    const torch::jit::Node* node = value->node();
    if (node->kind() != c10::prim::GetAttr) return "";
    const std::string& name = node->s(c10::attr::name);
    path = path.empty() ? name : fmt::format("{}.{}", name, path);
    value = node->input(0);
  }
  return path;
}

/// A call of batch_norm in a graph: the paths of the attributes that are its arguments; empty for
/// other values.
struct Call {
  std::string running_mean;
  std::string weight;
};

void find_calls(const torch::jit::Block* block, const torch::jit::Value* self,
                std::vector<Call>& found) {
  for (const torch::jit::Node* node : block->nodes()) {
    for (const torch::jit::Block* inner : node->blocks()) find_calls(inner, self, found);
    const std::string_view kind = node->kind().toQualString();
    if (kind != kBatchNorm.plain && kind != kBatchNorm.sync) continue;
    found.push_back({attribute_path(node->input(3), self), attribute_path(node->input(1), self)});
  }
}

using Types = std::unordered_map<c10::ClassTypePtr, c10::ClassTypePtr>;

/// Maps the types of a module and of its submodules to those of a copy.
void find_types(const torch::jit::Module& module, const torch::jit::Module& copy, Types& found) {
  if (!found.emplace(module.type(), copy.type()).second) return;
  for (const auto& [name, child] : module.named_children()) {
    find_types(child, copy.attr(name).toModule(), found);
  }
}

/// Copies the hooks of the module's types to those of a copy: Module::clone() does not.
void copy_hooks(const torch::jit::Module& module, const torch::jit::Module& copy) {
  Types types;
  find_types(module, copy, types);
  const auto in_copy = [&types](const c10::TypePtr& type) -> c10::TypePtr {
    const auto found = types.find(type->cast<c10::ClassType>());
    return found == types.end() ? type : found->second;
  };
  for (const auto& [from, to] : types) {
    if (!to->getForwardPreHooks().empty() || !to->getForwardHooks().empty()) continue;
    std::map<std::string, torch::jit::Function*> made;  // one function may be several hooks
    const auto copied = [&, &to = to](torch::jit::Function* hook) {
      torch::jit::Function*& function = made[hook->name()];
      if (function == nullptr) {
        auto graph = torch::jit::toGraphFunction(*hook).graph()->copy();
        graph->remapTypes(in_copy);
        function = to->compilation_unit()->create_function(
            c10::QualifiedName(*to->name(), hook->name()), std::move(graph));
        function->setSchema(hook->getSchema().cloneWithRemappedTypes(in_copy));
      }
      return function;
    };
    for (auto* hook : from->getForwardPreHooks()) to->addForwardPreHook(copied(hook));
    for (auto* hook : from->getForwardHooks()) to->addForwardHook(copied(hook));
  }
}

/// Replaces `module` by a copy with types of its own, and rewrites their methods and hooks. The old
/// types' graphs cannot change: the executor caches plans of graphs that have run. Parameters and
/// buffers stay the same tensors.
void rewrite(torch::jit::Module& module, Direction direction) {
  torch::jit::Module copy = module.clone(/*inplace=*/true);
  copy_hooks(module, copy);
  for (const torch::jit::Module& part : copy.modules()) {
    std::vector<torch::jit::Function*> functions = part.type()->methods();
    for (const auto& hooks : {part.type()->getForwardPreHooks(), part.type()->getForwardHooks()}) {
      functions.insert(functions.end(), hooks.begin(), hooks.end());
    }
    for (torch::jit::Function* function : functions) {
      auto& made = torch::jit::toGraphFunction(*function);
      torch::jit::Inline(*made.graph());
      replace_nodes(made.graph()->block(), direction);
      // Inlining this function into another one cached its optimised graph.
      made.clear_optimized_graphs();
    }
  }
  module = copy;
}

/// The calls of batch_norm, converted or not, in all methods.
std::vector<Call> calls_in(const torch::jit::Module& module) {
  std::vector<Call> calls;
  for (const torch::jit::Method& method : module.get_methods()) {
    const auto graph = method.graph();
    find_calls(graph->block(), graph->inputs()[0], calls);
  }
  return calls;
}

/// Decides by the class name. A class with submodules is a block that contains such a layer.
bool is_batch_norm(const torch::jit::Module& module) {
  return detail::class_of(module).find("BatchNorm") != std::string::npos &&
         module.children().size() == 0;
}

struct ScriptLayer {
  std::string name;
  torch::jit::Module module;
  at::Tensor running_mean;
  at::Tensor weight;
};

/// The module and the tensor that a path leads to.
std::pair<torch::jit::Module, at::Tensor> follow(torch::jit::Module module, std::string path) {
  for (size_t dot = path.find('.'); dot != std::string::npos; dot = path.find('.')) {
    module = module.attr(path.substr(0, dot)).toModule();
    path.erase(0, dot + 1);
  }
  return {module, detail::tensor_attribute(module, path)};
}

/// A weak pointer to a module. Thread-safe. Call release() when the module may be gone: an
/// ivalue::Object keeps its attributes in memory until its last weak pointer is gone.
class WeakScriptModule {
 public:
  explicit WeakScriptModule(const torch::jit::Module& module) : object_(module._ivalue()) {}

  c10::intrusive_ptr<c10::ivalue::Object> lock() const {
    const std::lock_guard lock(mutex_);
    return object_.lock();
  }

  /// Drops the pointer if the module has been destroyed.
  void release() {
    c10::weak_intrusive_ptr<c10::ivalue::Object> destroyed{
        c10::intrusive_ptr<c10::ivalue::Object>()};
    const std::lock_guard lock(mutex_);
    if (object_.expired()) std::swap(object_, destroyed);
  }

 private:
  mutable std::mutex mutex_;
  c10::weak_intrusive_ptr<c10::ivalue::Object> object_;
};

/// The batch-norm layers of a module: modules whose class is_batch_norm() recognises, and modules
/// of other classes whose attributes are arguments of batch_norm.
std::vector<ScriptLayer> find_layers(const torch::jit::Module& module,
                                     const std::vector<Call>& calls) {
  std::vector<ScriptLayer> found;
  for (const auto& [name, layer] : module.named_modules()) {
    if (!is_batch_norm(layer)) continue;
    found.push_back({name, layer, detail::tensor_attribute(layer, "running_mean"),
                     detail::tensor_attribute(layer, "weight")});
  }
  std::set<std::string> seen;
  for (const Call& call : calls) {
    const std::string& path = call.running_mean.empty() ? call.weight : call.running_mean;
    if (path.empty()) continue;
    const size_t dot = path.rfind('.');
    const std::string name = dot == std::string::npos ? "" : path.substr(0, dot);
    const auto [owner, key] = follow(module, path);
    if (is_batch_norm(owner) || !seen.insert(path).second) continue;
    const at::Tensor weight =
        call.weight.empty() ? at::Tensor() : follow(module, call.weight).second;
    found.push_back({name, owner, call.running_mean.empty() ? at::Tensor() : key, weight});
  }
  return found;
}

}  // namespace

ConvertReport convert_sync_batchnorm(torch::jit::Module& module, const GroupOrDefault& group,
                                     std::optional<std::chrono::milliseconds> sync_timeout) {
  sync_timeout = detail::checked(sync_timeout, "convert_sync_batchnorm: sync_timeout");
  detail::install_operators();
  rewrite(module, Direction::kConvert);
  const std::vector<Call> calls = calls_in(module);
  ConvertReport report;
  auto unknown = std::count_if(calls.begin(), calls.end(), [](const Call& call) {
    return call.running_mean.empty() && call.weight.empty();
  });
  for (const ScriptLayer& layer : find_layers(module, calls)) {
    if (!layer.running_mean.defined() && !layer.weight.defined()) {
      --unknown;  // reported here, by name
      report.not_converted.push_back(
          {layer.name, "it has neither running statistics nor a weight to be recognised by"});
      continue;
    }
    const auto weak = std::make_shared<WeakScriptModule>(layer.module);
    const auto is_training = [weak] {
      const auto object = weak->lock();
      return !object || torch::jit::Module(object).is_training();
    };
    const auto counter = [weak] {
      const auto object = weak->lock();
      return object ? detail::tensor_attribute(torch::jit::Module(object), "num_batches_tracked")
                    : at::Tensor();
    };
    detail::register_layer(
        layer.running_mean, layer.weight,
        {.name = std::make_shared<detail::LayerName>(detail::LayerName{.given = layer.name}),
         .group = group,
         .timeout = sync_timeout,
         .is_training = is_training,
         .num_batches_tracked = counter,
         .release = [weak] { weak->release(); },
         .is_script = true});
    report.converted.push_back(layer.name);
  }
  if (unknown > 0) {
    report.not_converted.push_back(
        {"", fmt::format("{} call(s) of batch_norm have arguments that are not attributes of a "
                         "module, and are not synchronised",
                         unknown)});
  }
  return report;
}

c10::IValue forward_converted(torch::jit::Module& module, std::vector<c10::IValue> inputs) {
  return detail::run_script([&] { return module.forward(std::move(inputs)); });
}

void revert_sync_batchnorm(torch::jit::Module& module) {
  rewrite(module, Direction::kRevert);
  for (const ScriptLayer& layer : find_layers(module, calls_in(module))) {
    detail::unregister_layer(layer.running_mean, layer.weight);
  }
}

}  // namespace syncbn::dist
