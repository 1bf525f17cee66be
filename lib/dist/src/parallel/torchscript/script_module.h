#pragma once

#include <string>

#include <torch/csrc/jit/api/module.h>

namespace syncbn::dist::detail {

/// Undefined if the module has no tensor attribute of this name.
inline at::Tensor tensor_attribute(const torch::jit::Module& module, const std::string& name) {
  if (!module.hasattr(name)) return {};
  const c10::IValue value = module.attr(name);
  return value.isTensor() ? value.toTensor() : at::Tensor();
}

/// The name of the module's class in Python.
inline std::string class_of(const torch::jit::Module& module) {
  const auto name = module.type()->name();
  return name ? name->name() : "ScriptModule";
}

}  // namespace syncbn::dist::detail
