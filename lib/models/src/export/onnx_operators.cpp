// Translates the ATen operators of image networks to ONNX's (github.com/onnx/onnx,
// docs/Operators.md, opset 18). Argument numbers are positions in ATen's native_functions.yaml.
#include "export/onnx_operators.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <numbers>
#include <unordered_map>
#include <utility>

#include <syncbn/base/error.h>

namespace syncbn::models::detail {

std::vector<int64_t> OnnxCall::integers(size_t i, size_t size) const {
  std::vector<int64_t> all = at(i).isInt() ? std::vector{integer(i)} : at(i).toIntVector();
  if (all.size() == 1) all.resize(size, all.front());
  return all;
}

std::string OnnxCall::name(size_t i) const {
  if (is_none(i)) return "";
  return at(i).isTensor() ? names_.name_of(tensor(i)) : constant(number(i));
}

std::vector<std::string> OnnxCall::names(size_t i) const {
  std::vector<std::string> all;
  for (const c10::IValue& item : at(i).toListRef()) all.push_back(names_.name_of(item.toTensor()));
  return all;
}

std::string OnnxCall::constant(const std::vector<int64_t>& integers) const {
  return names_.name_of(at::tensor(integers, at::kLong));
}

std::string OnnxCall::constant(double number) const {
  return names_.name_of(at::scalar_tensor(number, at::kFloat));
}

namespace {

using Names = std::vector<std::string>;
using Ints = std::vector<int64_t>;

/// ONNX lists the padding at the beginning of each dimension, then at the end.
Ints both_ends(Ints padding) {
  const Ints begin = padding;
  padding.insert(padding.end(), begin.begin(), begin.end());
  return padding;
}

void require(bool holds, const char* what) {
  if (!holds) throw base::UserError(what);
}

/// An operator on one tensor, which ONNX calls kName.
template <const char* kName>
Names unary(const OnnxCall& call) {
  return {call.add(kName, {call.name(0)})};
}

template <const char* kName>
Names binary(const OnnxCall& call) {
  require(call.size() == 2, "it has more than two arguments");
  return {call.add(kName, {call.name(0), call.name(1)})};
}

constexpr char kRelu[] = "Relu", kSigmoid[] = "Sigmoid", kTanh[] = "Tanh", kMul[] = "Mul",
               kDiv[] = "Div", kMatMul[] = "MatMul", kHardSwish[] = "HardSwish";

/// Add or Sub, whose second argument has a factor.
template <const char* kName>
Names sum(const OnnxCall& call) {
  std::string second = call.name(1);
  if (call.number(2) != 1) second = call.add("Mul", {second, call.name(2)});
  return {call.add(kName, {call.name(0), second})};
}

constexpr char kAdd[] = "Add", kSub[] = "Sub";

/// A call that returns its input in evaluation mode.
Names same(const OnnxCall& call) {
  return {call.name(0)};
}

Names dropout(const OnnxCall& call) {
  require(!call.flag(2), "it is in training mode");
  return same(call);
}

/// The places of arguments that differ between the operators for convolution.
struct ConvolutionPlaces {
  size_t dilation;
  size_t groups;
  size_t output_padding = 0;
};

Names add_convolution(const OnnxCall& call, bool transposed, const ConvolutionPlaces& at) {
  std::vector<OnnxAttribute> attributes = {{"strides", call.integers(3, 2)},
                                           {"pads", both_ends(call.integers(4, 2))},
                                           {"dilations", call.integers(at.dilation, 2)},
                                           {"group", call.integer(at.groups)}};
  if (transposed) attributes.push_back({"output_padding", call.integers(at.output_padding, 2)});
  Names inputs = {call.name(0), call.name(1)};
  if (!call.is_none(2)) inputs.push_back(call.name(2));
  return {call.add(transposed ? "ConvTranspose" : "Conv", std::move(inputs), attributes)};
}

Names conv2d(const OnnxCall& call) {
  return add_convolution(call, false, {.dilation = 5, .groups = 6});
}

Names conv_transpose2d(const OnnxCall& call) {
  return add_convolution(call, true, {.dilation = 7, .groups = 6, .output_padding = 5});
}

/// aten::_convolution, which Python's traces have for both kinds of convolution.
Names convolution(const OnnxCall& call) {
  return add_convolution(call, call.flag(6), {.dilation = 5, .groups = 8, .output_padding = 7});
}

Names batch_norm(const OnnxCall& call) {
  require(!call.flag(5), "it is in training mode");
  require(!call.is_none(1) && !call.is_none(3), "it has no weight or no running statistics");
  return {call.add("BatchNormalization",
                   {call.name(0), call.name(1), call.name(2), call.name(3), call.name(4)},
                   {{"epsilon", call.number(7)}})};
}

Names layer_norm(const OnnxCall& call) {
  require(!call.is_none(2), "it has no weight");
  Names inputs = {call.name(0), call.name(2)};
  if (!call.is_none(3)) inputs.push_back(call.name(3));
  const auto axis = -static_cast<int64_t>(call.integers(1).size());
  return {call.add("LayerNormalization", std::move(inputs),
                   {{"axis", axis}, {"epsilon", call.number(4)}})};
}

/// Uses ONNX's instance norm for each group, because its group norm changed with opset 21.
Names group_norm(const OnnxCall& call) {
  require(!call.is_none(2) && !call.is_none(3), "it has no weight or no bias");
  const at::Tensor x = call.tensor(0);
  const int64_t groups = call.integer(1);
  const auto zeros = at::zeros({groups}, at::kFloat);
  const std::string grouped =
      call.add("Reshape", {call.name(0), call.constant(Ints{0, groups, -1})});
  const std::string normed =
      call.add("InstanceNormalization", {grouped, call.constant(zeros + 1), call.constant(zeros)},
               {{"epsilon", call.number(4)}});
  Ints shape = x.sizes().vec();
  shape.front() = 0;
  Ints per_channel(shape.size() - 1, 1);
  per_channel.front() = shape[1];
  const auto of_channels = [&](size_t i) {
    return call.constant(call.tensor(i).view(per_channel));
  };
  const std::string back = call.add("Reshape", {normed, call.constant(shape)});
  return {call.add("Add", {call.add("Mul", {back, of_channels(2)}), of_channels(3)})};
}

Names hardtanh(const OnnxCall& call) {
  return {call.add("Clip", {call.name(0), call.name(1), call.name(2)})};
}

Names hardsigmoid(const OnnxCall& call) {
  return {call.add("HardSigmoid", {call.name(0)}, {{"alpha", 1.0 / 6}, {"beta", 0.5}})};
}

Names silu(const OnnxCall& call) {
  return {call.add("Mul", {call.name(0), call.add("Sigmoid", {call.name(0)})})};
}

/// x / 2 (1 + erf(x / sqrt(2))): opset 18 has no Gelu.
Names gelu(const OnnxCall& call) {
  require(call.at(1).toStringRef() == "none", "it is an approximation");
  const std::string x = call.name(0);
  const std::string erf =
      call.add("Erf", {call.add("Mul", {x, call.constant(1 / std::numbers::sqrt2)})});
  const std::string factor = call.add("Add", {erf, call.constant(1.0)});
  return {call.add("Mul", {call.add("Mul", {x, call.constant(0.5)}), factor})};
}

/// The attributes of pooling: those of its window, and `others`.
std::vector<OnnxAttribute> pooling(const OnnxCall& call, const std::vector<OnnxAttribute>& others) {
  const Ints kernel = call.integers(1, 2);
  const Ints stride = call.integers(2, 2);
  std::vector<OnnxAttribute> all = {{"kernel_shape", kernel},
                                    {"strides", stride.empty() ? kernel : stride},
                                    {"pads", both_ends(call.integers(3, 2))}};
  all.insert(all.end(), others.begin(), others.end());
  return all;
}

Names max_pool2d(const OnnxCall& call) {
  return {call.add(
      "MaxPool", {call.name(0)},
      pooling(call, {{"dilations", call.integers(4, 2)}, {"ceil_mode", int64_t{call.flag(5)}}}))};
}

Names avg_pool2d(const OnnxCall& call) {
  require(call.is_none(6), "it has a divisor of its own");
  return {call.add("AveragePool", {call.name(0)},
                   pooling(call, {{"ceil_mode", int64_t{call.flag(4)}},
                                  {"count_include_pad", int64_t{call.flag(5)}}}))};
}

/// [out, in]: row i takes the mean over the cells floor(i in / out) to ceil((i + 1) in / out) - 1,
/// as adaptive pooling does.
at::Tensor mean_matrix(int64_t out, int64_t in) {
  at::Tensor matrix = at::zeros({out, in});
  for (int64_t i = 0; i < out; ++i) {
    const int64_t begin = i * in / out;
    const int64_t end = ((i + 1) * in + out - 1) / out;
    matrix[i].slice(0, begin, end).fill_(1.0 / static_cast<double>(end - begin));
  }
  return matrix;
}

/// Multiplies by a matrix in each direction: ONNX has adaptive pooling only for one output cell.
Names adaptive_avg_pool2d(const OnnxCall& call) {
  const at::Tensor x = call.tensor(0);
  const at::Tensor y = call.result();
  if (y.size(2) == 1 && y.size(3) == 1) return {call.add("GlobalAveragePool", {call.name(0)})};
  if (y.sizes() == x.sizes()) return same(call);
  const std::string rows =
      call.add("MatMul", {call.constant(mean_matrix(y.size(2), x.size(2))), call.name(0)});
  return {call.add("MatMul", {rows, call.constant(mean_matrix(y.size(3), x.size(3)).t())})};
}

Names mean(const OnnxCall& call) {
  return {call.add("ReduceMean", {call.name(0), call.constant(call.integers(1))},
                   {{"keepdims", int64_t{call.flag(2)}}})};
}

/// Any operator that changes only the shape. The 0 copies the number of images, which may vary.
Names reshape(const OnnxCall& call) {
  Ints shape = call.result().sizes().vec();
  require(!shape.empty() && shape.front() == call.tensor(0).size(0),
          "the images must stay the first dimension");
  shape.front() = 0;
  return {call.add("Reshape", {call.name(0), call.constant(shape)})};
}

Names add_transpose(const OnnxCall& call, const Ints& order) {
  return {call.add("Transpose", {call.name(0)}, {{"perm", order}})};
}

int64_t wrapped(int64_t dim, int64_t dims) {
  return dim < 0 ? dim + dims : dim;
}

Names permute(const OnnxCall& call) {
  Ints order = call.integers(1);
  for (int64_t& dim : order) dim = wrapped(dim, call.tensor(0).dim());
  return add_transpose(call, order);
}

Names transpose(const OnnxCall& call) {
  const int64_t dims = call.tensor(0).dim();
  Ints order;
  for (int64_t i = 0; i < dims; ++i) order.push_back(i);
  std::swap(order[static_cast<size_t>(wrapped(call.integer(1), dims))],
            order[static_cast<size_t>(wrapped(call.integer(2), dims))]);
  return add_transpose(call, order);
}

Names cat(const OnnxCall& call) {
  return {call.add("Concat", call.names(0), {{"axis", call.integer(1)}})};
}

Names chunk(const OnnxCall& call) {
  Ints sizes;
  for (const c10::IValue& part : call.results().toListRef()) {
    sizes.push_back(part.toTensor().size(call.integer(2)));
  }
  return call.add_all("Split", {call.name(0), call.constant(sizes)}, {{"axis", call.integer(2)}},
                      sizes.size());
}

Names slice(const OnnxCall& call) {
  const int64_t begin = call.is_none(2) ? 0 : call.integer(2);
  const int64_t end = call.is_none(3) ? INT64_MAX : call.integer(3);
  require(wrapped(call.integer(1), call.tensor(0).dim()) != 0, "it leaves images out");
  return {call.add("Slice",
                   {call.name(0), call.constant(Ints{begin}), call.constant(Ints{end}),
                    call.constant(Ints{call.integer(1)}), call.constant(Ints{call.integer(4)})})};
}

Names linear(const OnnxCall& call) {
  const std::string product = call.add("MatMul", {call.name(0), call.constant(call.tensor(1).t())});
  if (call.is_none(2)) return {product};
  return {call.add("Add", {product, call.name(2)})};
}

Names addmm(const OnnxCall& call) {
  return {call.add("Gemm", {call.name(1), call.name(2), call.name(0)},
                   {{"alpha", call.number(4)}, {"beta", call.number(3)}})};
}

/// @param how attributes besides the axes, which are height and width
Names add_resize(const OnnxCall& call, std::vector<OnnxAttribute> how) {
  require(!call.is_none(1), "it has factors instead of a size");
  const auto height_and_width = call.result().sizes().slice(2).vec();
  how.push_back({"axes", Ints{2, 3}});
  return {
      call.add("Resize", {call.name(0), "", "", call.constant(height_and_width)}, std::move(how))};
}

Names upsample_bilinear2d(const OnnxCall& call) {
  const std::string mode = call.flag(2) ? "align_corners" : "pytorch_half_pixel";
  return add_resize(call,
                    {{"mode", std::string("linear")}, {"coordinate_transformation_mode", mode}});
}

Names upsample_nearest2d(const OnnxCall& call) {
  return add_resize(call, {{"mode", std::string("nearest")},
                           {"coordinate_transformation_mode", std::string("asymmetric")},
                           {"nearest_mode", std::string("floor")}});
}

/// ATen lists padding from the last dimension on.
Names constant_pad_nd(const OnnxCall& call) {
  const Ints padding = call.integers(1);
  Ints axes, begins, ends;
  for (size_t i = 0; i < padding.size(); i += 2) {
    axes.push_back(call.tensor(0).dim() - 1 - static_cast<int64_t>(i / 2));
    begins.push_back(padding[i]);
    ends.push_back(padding[i + 1]);
  }
  begins.insert(begins.end(), ends.begin(), ends.end());
  return {
      call.add("Pad", {call.name(0), call.constant(begins), call.name(2), call.constant(axes)})};
}

}  // namespace

EmitOnnx onnx_counterpart(const std::string& aten_operator) {
  static const std::unordered_map<std::string, EmitOnnx> all = {
      {"_convolution", convolution},
      {"adaptive_avg_pool2d", adaptive_avg_pool2d},
      {"add", sum<kAdd>},
      {"addmm", addmm},
      {"avg_pool2d", avg_pool2d},
      {"batch_norm", batch_norm},
      {"cat", cat},
      {"chunk", chunk},
      {"constant_pad_nd", constant_pad_nd},
      {"contiguous", same},
      {"conv2d", conv2d},
      {"conv_transpose2d", conv_transpose2d},
      {"detach", same},
      {"div", binary<kDiv>},
      {"dropout", dropout},
      {"flatten", reshape},
      {"gelu", gelu},
      {"group_norm", group_norm},
      {"hardsigmoid", hardsigmoid},
      {"hardswish", unary<kHardSwish>},
      {"hardtanh", hardtanh},
      {"layer_norm", layer_norm},
      {"linear", linear},
      {"matmul", binary<kMatMul>},
      {"max_pool2d", max_pool2d},
      {"mean", mean},
      {"mul", binary<kMul>},
      {"permute", permute},
      {"relu", unary<kRelu>},
      {"reshape", reshape},
      {"sigmoid", unary<kSigmoid>},
      {"silu", silu},
      {"slice", slice},
      {"squeeze", reshape},
      {"sub", sum<kSub>},
      {"tanh", unary<kTanh>},
      {"transpose", transpose},
      {"unflatten", reshape},
      {"unsqueeze", reshape},
      {"upsample_bilinear2d", upsample_bilinear2d},
      {"upsample_nearest2d", upsample_nearest2d},
      {"view", reshape},
  };
  const auto found = all.find(aten_operator);
  return found == all.end() ? nullptr : found->second;
}

}  // namespace syncbn::models::detail
