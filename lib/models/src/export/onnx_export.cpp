#include "export/onnx_export.h"

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/passes/inliner.h>
#include <torch/csrc/jit/runtime/operator.h>

#include <algorithm>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include <syncbn/base/error.h>

#include "export/onnx_model.h"
#include "export/onnx_operators.h"
#include "script_model.h"

namespace syncbn::models::detail {
namespace {

/// Whether a call's result depends only on the shapes and types of tensors.
bool asks_for_shape(const std::string& name) {
  static const std::set<std::string> all = {"aten::size",   "aten::dim",      "aten::len",
                                            "aten::numel",  "prim::dtype",    "prim::device",
                                            "aten::__is__", "aten::__isnot__"};
  return all.contains(name);
}

/// Runs a graph on an example and records it.
class OnnxRecorder : public OnnxNames {
  using Block = torch::jit::Block;
  using Node = torch::jit::Node;
  using Value = torch::jit::Value;

 public:
  explicit OnnxRecorder(const torch::jit::Module& module) : module_(module) {
    for (const auto& item : module.named_attributes()) {
      if (item.value.isTensor() && item.value.toTensor().defined()) {
        constants_.emplace(keep(item.value.toTensor()), item.name);
      }
    }
  }

  OnnxModel record(const at::Tensor& example) {
    const auto graph = module_.get_method("forward").graph()->copy();
    torch::jit::Inline(*graph);
    if (graph->inputs().size() != 2) refuse("its forward() takes more than the images");
    values_[graph->inputs()[0]] = module_._ivalue();
    values_[graph->inputs()[1]] = example;
    dynamic_[keep(example)] = "images";
    std::vector<int64_t> shape = example.sizes().vec();
    shape.front() = OnnxPort::kImages;
    model_.inputs = {{"images", std::move(shape)}};
    run(graph->block());
    std::vector<at::Tensor> outputs;
    for (const Value* output : graph->outputs()) {
      for (const at::Tensor& tensor : tensors_in(values_.at(output))) outputs.push_back(tensor);
    }
    for (size_t i = 0; i < outputs.size(); ++i) {
      const bool is_constant = !dynamic_.contains(outputs[i].unsafeGetTensorImpl());
      if (!is_constant && (outputs[i].dim() == 0 || outputs[i].size(0) != example.size(0))) {
        refuse("an output has not one entry for each image");
      }
      const std::string name = outputs.size() == 1 ? "logits" : fmt::format("output_{}", i);
      model_.nodes.push_back({"Identity", {name_of(outputs[i])}, {name}, {}});
      std::vector<int64_t> sizes = outputs[i].sizes().vec();
      if (!is_constant) sizes.front() = OnnxPort::kImages;
      model_.outputs.push_back({name, std::move(sizes)});
    }
    return std::move(model_);
  }

  std::string name_of(const at::Tensor& tensor) override {
    const at::TensorImpl* const key = keep(tensor);
    if (const auto found = dynamic_.find(key); found != dynamic_.end()) return found->second;
    auto [entry, is_new] = constants_.emplace(key, "");
    if (is_new) entry->second = fmt::format("constant_{}", constants_.size());
    const std::string& name = entry->second;
    if (const size_t dot = name.rfind('.'); dot != name.npos) layer_ = name.substr(0, dot);
    if (written_.insert(key).second) {
      model_.initializers.emplace_back(
          name, tensor.scalar_type() == at::kLong ? tensor : tensor.to(at::kFloat));
    }
    return name;
  }

  std::vector<std::string> add(const std::string& op_type, std::vector<std::string> inputs,
                               std::vector<OnnxAttribute> attributes, size_t outputs) override {
    std::vector<std::string> names;
    while (names.size() < outputs) {
      names.push_back(fmt::format("{}_{}", op_type, model_.nodes.size()));
      if (outputs > 1) names.back() += fmt::format("_{}", names.size());
    }
    model_.nodes.push_back({op_type, std::move(inputs), names, std::move(attributes)});
    return names;
  }

 private:
  /// Keeps a tensor alive: its address identifies it and must not be reused.
  const at::TensorImpl* keep(const at::Tensor& tensor) {
    kept_.push_back(tensor);
    return tensor.unsafeGetTensorImpl();
  }

  [[noreturn]] void refuse(const std::string& why) const {
    throw base::UserError(
        fmt::format("cannot export to ONNX: {}; choose --format torchscript", why));
  }

  std::string place() const {
    return layer_.empty() ? "" : fmt::format(" (behind layer {})", layer_);
  }

  bool is_dynamic(const c10::IValue& value) const {
    return std::ranges::any_of(tensors_in(value), [this](const at::Tensor& tensor) {
      return dynamic_.contains(tensor.unsafeGetTensorImpl());
    });
  }

  void run(const Block* block) {
    for (const Node* const node : block->nodes()) run(node);
  }

  void run(const Node* node) {
    if (node->kind() == c10::prim::If) return run_branch(node);
    std::vector<c10::IValue> inputs;
    for (const Value* input : node->inputs()) inputs.push_back(values_.at(input));
    const std::vector<c10::IValue> results = results_of(*node, inputs);
    for (size_t i = 0; i < results.size(); ++i) values_[node->output(i)] = results[i];
    const std::string name = node->kind().toQualString();
    const auto depends = [this](const c10::IValue& value) { return is_dynamic(value); };
    // A call without results changes a list or dictionary in values_.
    if (node->kind().is_aten() && !results.empty() && !asks_for_shape(name) &&
        std::ranges::any_of(inputs, depends)) {
      record_call(name, inputs, results.front());
    }
  }

  /// Runs a node without blocks.
  std::vector<c10::IValue> results_of(const Node& node, const std::vector<c10::IValue>& inputs) {
    switch (node.kind()) {
      case c10::prim::Constant:
        return {torch::jit::toIValue(node.output()).value_or(c10::IValue())};
      case c10::prim::GetAttr:
        return {inputs.front().toObject()->getAttr(node.s(c10::attr::name))};
      case c10::prim::ListConstruct: {
        c10::impl::GenericList list(
            node.output()->type()->expectRef<c10::ListType>().getElementType());
        for (const c10::IValue& item : inputs) list.push_back(item);
        return {list};
      }
      case c10::prim::TupleConstruct:
        return {c10::ivalue::Tuple::create(inputs)};
      case c10::prim::DictConstruct: {
        const auto& type = node.output()->type()->expectRef<c10::DictType>();
        c10::impl::GenericDict dict(type.getKeyType(), type.getValueType());
        for (size_t i = 0; i < inputs.size(); i += 2) dict.insert(inputs[i], inputs[i + 1]);
        return {dict};
      }
      case c10::prim::ListUnpack:
        return inputs.front().toListRef().vec();
      case c10::prim::TupleUnpack:
        return inputs.front().toTupleRef().elements().vec();
      default:
        break;
    }
    if (node.maybeOperator() == nullptr || !node.blocks().empty()) {
      refuse(fmt::format("{} has no counterpart here{}", node.kind().toQualString(), place()));
    }
    torch::jit::Stack stack = inputs;
    node.getOperation()(stack);
    return stack;
  }

  void run_branch(const Node* node) {
    const bool condition = values_.at(node->input()).toBool();
    const Block* const branch = node->blocks()[condition ? 0 : 1];
    run(branch);
    for (size_t i = 0; i < node->outputs().size(); ++i) {
      values_[node->output(i)] = values_.at(branch->outputs()[i]);
    }
  }

  /// ONNX has values, not memory: changing one tensor must not change another.
  void check_in_place(const std::string& name, const at::Tensor& changed) const {
    const auto is_changed_too = [&](const at::Tensor& other) {
      return !other.is_same(changed) && dynamic_.contains(other.unsafeGetTensorImpl()) &&
             other.is_alias_of(changed);
    };
    if (std::ranges::none_of(kept_, is_changed_too)) return;
    refuse(fmt::format("{} changes a view of another tensor{}", name, place()));
  }

  void record_call(const std::string& name, const std::vector<c10::IValue>& inputs,
                   const c10::IValue& output) {
    std::string plain = name.substr(std::string_view("aten::").size());
    if (plain.ends_with('_')) {
      plain.pop_back();
      check_in_place(name, output.toTensor());
    }
    const EmitOnnx emit = onnx_counterpart(plain);
    if (emit == nullptr) refuse(fmt::format("{} has no counterpart here{}", name, place()));
    std::vector<std::string> names;
    try {
      names = emit(OnnxCall(*this, inputs, output));
    } catch (const base::UserError& error) {
      refuse(fmt::format("{} has no counterpart here{}: {}", name, place(), error.what()));
    } catch (const c10::Error&) {
      refuse(fmt::format("this form of {} has no counterpart here{}", name, place()));
    }
    const std::vector<at::Tensor> results = tensors_in(output);
    for (size_t i = 0; i < results.size(); ++i) dynamic_[keep(results[i])] = names.at(i);
  }

  const torch::jit::Module module_;
  OnnxModel model_;
  std::unordered_map<const Value*, c10::IValue> values_;
  std::unordered_map<const at::TensorImpl*, std::string> dynamic_;    ///< depend on the images
  std::unordered_map<const at::TensorImpl*, std::string> constants_;  ///< parameters and others
  std::set<const at::TensorImpl*> written_;                           ///< constants in model_
  std::vector<at::Tensor> kept_;
  std::string layer_;  ///< the layer whose parameters were used last
};

}  // namespace

std::string onnx_bytes(const torch::jit::Module& module, const at::Tensor& example,
                       const std::map<std::string, std::string>& metadata) {
  const at::NoGradGuard no_grad;
  OnnxModel model = OnnxRecorder(module).record(example);
  model.metadata = metadata;
  return serialize(model);
}

}  // namespace syncbn::models::detail
