#include "export/traced_module.h"

#include <ATen/ops/allclose.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include <syncbn/base/error.h>

#include "script_model.h"

namespace syncbn::models::detail {
namespace {

/// A TorchScript module without methods over a module's parameters, buffers and children.
torch::jit::Module script_tree(const torch::nn::Module& module,
                               const std::shared_ptr<torch::jit::CompilationUnit>& unit) {
  torch::jit::Module script(c10::QualifiedName("__torch__.syncbn.Layer"), unit,
                            /*shouldMangle=*/true);
  script.register_attribute("training", c10::BoolType::get(), false);
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    script.register_parameter(item.key(), item.value(), /*is_buffer=*/false);
  }
  for (const auto& item : module.named_buffers(/*recurse=*/false)) {
    script.register_buffer(item.key(), item.value());
  }
  for (const auto& item : module.named_children()) {
    script.register_module(item.key(), script_tree(*item.value(), unit));
  }
  return script;
}

c10::IValue one_or_tuple(const std::vector<at::Tensor>& outputs) {
  if (outputs.size() == 1) return outputs.front();
  return c10::ivalue::Tuple::create(std::vector<c10::IValue>(outputs.begin(), outputs.end()));
}

bool computes_the_same(Model& model, torch::jit::Module& traced, const at::Tensor& images) {
  const std::vector<at::Tensor> expected = model.forward_all(images);
  std::vector<at::Tensor> found;
  try {
    found = tensors_in(traced.forward({images}));
  } catch (const std::exception&) {
    return false;  // sizes of the example do not fit
  }
  return std::ranges::equal(found, expected, [](const at::Tensor& a, const at::Tensor& b) {
    return a.sizes() == b.sizes() && at::allclose(a, b, 1e-3, 1e-3, /*equal_nan=*/true);
  });
}

}  // namespace

torch::jit::Module traced_module(Model& model, const at::Tensor& example) {
  const at::NoGradGuard no_grad;
  model.eval();
  if (const auto* script = dynamic_cast<const ScriptModel*>(&model)) return script->script();
  torch::jit::Module traced = script_tree(model, std::make_shared<torch::jit::CompilationUnit>());
  const auto forward = [&model](torch::jit::Stack inputs) {
    return torch::jit::Stack{one_or_tuple(model.forward_all(inputs.front().toTensor()))};
  };
  const auto [state, outputs] = torch::jit::tracer::trace(
      {example}, forward, [](const at::Tensor&) { return std::string(); }, /*strict=*/true,
      /*force_outplace=*/false, &traced, {"images"});
  auto* const method = traced._ivalue()->compilation_unit()->create_function(
      c10::QualifiedName(*traced.type()->name(), "forward"), state->graph);
  traced.type()->addMethod(method);
  if (computes_the_same(model, traced, example.narrow(0, 0, 1).flip(-1))) return traced;
  throw base::UserError(
      "the network cannot be traced: what its forward() computes depends on the number of images "
      "or on their values; choose --format torch or safetensors");
}

}  // namespace syncbn::models::detail
