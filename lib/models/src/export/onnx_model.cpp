#include "export/onnx_model.h"

#include <fmt/format.h>

#include <limits>
#include <protozero/pbf_writer.hpp>

#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

namespace syncbn::models::detail {
namespace {

using protozero::pbf_writer;

constexpr int64_t kIrVersion = 8;  // the oldest for kOpset
constexpr int64_t kOpset = 18;     // Resize and Pad take axes

// Numbers of fields and values are from onnx.proto.

enum ElementType : int32_t { kFloat = 1, kInt64 = 7 };

/// Writes each item as a message of the field `number`.
template <class Items, class Write>
void add_messages(pbf_writer& to, protozero::pbf_tag_type number, const Items& items,
                  const Write& write) {
  for (const auto& item : items) {
    pbf_writer message(to, number);
    write(message, item);
  }
}

void write_attribute(pbf_writer& to, const OnnxAttribute& attribute) {
  enum Type : int32_t { kFloatType = 1, kIntType = 2, kStringType = 3, kIntsType = 7 };
  const auto put = [&to]<class Value>(const Value& value) {
    if constexpr (std::is_same_v<Value, int64_t>) {
      to.add_int64(3, value);
      to.add_enum(20, kIntType);
    } else if constexpr (std::is_same_v<Value, double>) {
      to.add_float(2, static_cast<float>(value));
      to.add_enum(20, kFloatType);
    } else if constexpr (std::is_same_v<Value, std::string>) {
      to.add_bytes(4, value);
      to.add_enum(20, kStringType);
    } else {
      for (const int64_t item : value) to.add_int64(8, item);
      to.add_enum(20, kIntsType);
    }
  };
  to.add_string(1, attribute.name);
  std::visit(put, attribute.value);
}

void write_node(pbf_writer& to, const OnnxNode& node) {
  for (const std::string& input : node.inputs) to.add_string(1, input);
  for (const std::string& output : node.outputs) to.add_string(2, output);
  to.add_string(4, node.op_type);
  add_messages(to, 5, node.attributes, write_attribute);
}

void write_initializer(pbf_writer& to, const std::pair<std::string, at::Tensor>& initializer) {
  const auto& [name, tensor] = initializer;
  const at::Tensor host = tensor.detach().cpu().contiguous();
  for (const int64_t size : host.sizes()) to.add_int64(1, size);
  to.add_int32(2, host.scalar_type() == at::kLong ? kInt64 : kFloat);
  to.add_string(8, name);
  to.add_bytes(9, static_cast<const char*>(host.const_data_ptr()), host.nbytes());
}

void write_port(pbf_writer& to, const OnnxPort& port) {
  to.add_string(1, port.name);
  pbf_writer type(to, 2);
  pbf_writer tensor(type, 1);
  tensor.add_int32(1, kFloat);
  pbf_writer shape(tensor, 2);
  for (size_t i = 0; i < port.shape.size(); ++i) {
    pbf_writer dimension(shape, 1);
    if (port.shape[i] == OnnxPort::kImages) {
      dimension.add_string(2, "N");
    } else {
      dimension.add_int64(1, port.shape[i]);
    }
  }
}

void write_graph(pbf_writer& to, const OnnxModel& model) {
  add_messages(to, 1, model.nodes, write_node);
  to.add_string(2, "network");
  add_messages(to, 5, model.initializers, write_initializer);
  add_messages(to, 11, model.inputs, write_port);
  add_messages(to, 12, model.outputs, write_port);
}

void check_size(const OnnxModel& model) {
  constexpr size_t kRest = size_t{16} << 20;  // bytes, ample for nodes and names
  constexpr size_t kMax = std::numeric_limits<int32_t>::max() - kRest;
  size_t bytes = 0;
  for (const auto& [name, tensor] : model.initializers) bytes += tensor.nbytes();
  if (bytes <= kMax) return;
  throw base::UserError(fmt::format(
      "cannot export to ONNX: the weights have {}, and a file of ONNX holds 2 GB at most; choose "
      "--format torchscript",
      base::format_bytes(bytes)));
}

}  // namespace

std::string serialize(const OnnxModel& model) {
  check_size(model);
  std::string bytes;
  pbf_writer file(bytes);
  file.add_int64(1, kIrVersion);
  file.add_string(2, "syncbn");
  {
    pbf_writer graph(file, 7);
    write_graph(graph, model);
  }
  {
    pbf_writer opset(file, 8);
    opset.add_string(1, "");
    opset.add_int64(2, kOpset);
  }
  add_messages(file, 14, model.metadata, [](pbf_writer& to, const auto& entry) {
    to.add_string(1, entry.first);
    to.add_string(2, entry.second);
  });
  return bytes;
}

}  // namespace syncbn::models::detail
