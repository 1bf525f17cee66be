#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <ATen/core/Tensor.h>

namespace syncbn::models::detail {

/// An attribute of a node.
struct OnnxAttribute {
  std::string name;
  std::variant<int64_t, double, std::vector<int64_t>, std::string> value;
};

struct OnnxNode {
  std::string op_type;  ///< "Conv"
  std::vector<std::string> inputs;
  std::vector<std::string> outputs;
  std::vector<OnnxAttribute> attributes;
};

/// An input or output of the model.
struct OnnxPort {
  static constexpr int64_t kImages = -1;  ///< a dimension that is the number of images

  std::string name;
  std::vector<int64_t> shape;
};

/// The content of an ONNX file: a graph of nodes that name their inputs and outputs.
struct OnnxModel {
  std::vector<OnnxNode> nodes;
  std::vector<std::pair<std::string, at::Tensor>> initializers;  ///< float32 or int64
  std::vector<OnnxPort> inputs;
  std::vector<OnnxPort> outputs;
  std::map<std::string, std::string> metadata;
};

/// The bytes of the file, a protobuf message ModelProto (onnx/onnx.proto of ONNX 1.12 and later).
/// @throws base::UserError beyond 2 GB, the limit of protobuf
std::string serialize(const OnnxModel& model);

}  // namespace syncbn::models::detail
