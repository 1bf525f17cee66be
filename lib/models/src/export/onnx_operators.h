#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include "export/onnx_model.h"

namespace syncbn::models::detail {

/// Receives the nodes for an operator call, and names its tensors in the model.
class OnnxNames {
 public:
  virtual ~OnnxNames() = default;

  /// The name of a tensor that depends on the images, or of a constant.
  virtual std::string name_of(const at::Tensor& tensor) = 0;

  /// Adds a node, and names its outputs. @return their names
  virtual std::vector<std::string> add(const std::string& op_type, std::vector<std::string> inputs,
                                       std::vector<OnnxAttribute> attributes, size_t outputs) = 0;
};

/// A call of an ATen operator on example values: its arguments, by their position in the operator's
/// schema, and its result.
class OnnxCall {
 public:
  OnnxCall(OnnxNames& names, const std::vector<c10::IValue>& inputs, const c10::IValue& output)
      : names_(names), inputs_(inputs), output_(output) {}

  // Arguments.
  size_t size() const { return inputs_.size(); }
  const c10::IValue& at(size_t i) const { return inputs_.at(i); }
  bool is_none(size_t i) const { return at(i).isNone(); }
  at::Tensor tensor(size_t i) const { return at(i).toTensor(); }
  int64_t integer(size_t i) const { return at(i).toInt(); }
  double number(size_t i) const { return at(i).toScalar().toDouble(); }
  bool flag(size_t i) const { return at(i).toBool(); }
  /// @param size how often to repeat a single number
  std::vector<int64_t> integers(size_t i, size_t size = 1) const;
  /// The name of a tensor, or of a number as a tensor; empty for None.
  std::string name(size_t i) const;
  std::vector<std::string> names(size_t i) const;

  at::Tensor result() const { return output_.toTensor(); }
  const c10::IValue& results() const { return output_; }

  /// Adds a node. @return the name of its only output
  std::string add(const std::string& op_type, std::vector<std::string> inputs,
                  std::vector<OnnxAttribute> attributes = {}) const {
    return names_.add(op_type, std::move(inputs), std::move(attributes), 1).front();
  }
  /// Adds a node with several outputs.
  std::vector<std::string> add_all(const std::string& op_type, std::vector<std::string> inputs,
                                   std::vector<OnnxAttribute> attributes, size_t outputs) const {
    return names_.add(op_type, std::move(inputs), std::move(attributes), outputs);
  }
  /// The name of a constant.
  std::string constant(const at::Tensor& tensor) const { return names_.name_of(tensor); }
  std::string constant(const std::vector<int64_t>& integers) const;
  std::string constant(double number) const;

 private:
  OnnxNames& names_;
  const std::vector<c10::IValue>& inputs_;
  const c10::IValue& output_;
};

/// Adds the nodes that compute what a call does. @return the names of its results
using EmitOnnx = std::vector<std::string> (*)(const OnnxCall& call);

/// The function for an ATen operator, or null if none is known.
/// @param aten_operator without the underscore of an in-place operator
EmitOnnx onnx_counterpart(const std::string& aten_operator);

}  // namespace syncbn::models::detail
