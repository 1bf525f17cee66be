#pragma once

#include <string>
#include <utility>
#include <vector>

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

/// A copy of the value, containers included, with visit(tensor) in place of each tensor.
template <class Visit>
c10::IValue map_tensors(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? c10::IValue(visit(value.toTensor())) : value;
  }
  if (value.isTuple()) {
    std::vector<c10::IValue> items;
    for (const c10::IValue& item : value.toTupleRef().elements()) {
      items.push_back(map_tensors(item, visit));
    }
    return c10::ivalue::Tuple::createNamed(std::move(items), value.toTupleRef().type());
  }
  if (value.isList()) {
    c10::impl::GenericList mapped(value.toList().elementType());
    for (const c10::IValue& item : value.toListRef()) mapped.push_back(map_tensors(item, visit));
    return mapped;
  }
  if (value.isGenericDict()) {
    const auto dict = value.toGenericDict();
    c10::impl::GenericDict mapped(dict.keyType(), dict.valueType());
    for (const auto& item : dict) mapped.insert(item.key(), map_tensors(item.value(), visit));
    return mapped;
  }
  return value;
}

/// The tensors in the value, containers included.
inline std::vector<at::Tensor> tensors_in(const c10::IValue& value) {
  std::vector<at::Tensor> tensors;
  map_tensors(value, [&](const at::Tensor& tensor) { return tensors.emplace_back(tensor); });
  return tensors;
}

}  // namespace syncbn::dist::detail
