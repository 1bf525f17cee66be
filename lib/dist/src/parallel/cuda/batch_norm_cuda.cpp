// Batch norm on CUDA, for libsyncbn_dist_cuda.so: each function of the table launches one kernel
// and computes nothing with ATen's operators.

#include <fmt/format.h>
#include <syncbn/base/error.h>

#include <map>
#include <mutex>
#include <tuple>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "batch_norm/batch_norm_kernels.h"
#include "batch_norm/batch_norm_shape.h"
#include "cuda/batch_norm_launch.h"

namespace syncbn::dist::detail::cuda {
namespace {

// Target for the number of blocks per multiprocessor: enough that few multiprocessors are idle
// while the last blocks run. Fewer in reductions, where a tile's last block merges the results of
// the others. Guesses, not measured on a GPU.
constexpr int64_t kBlocks = 4;
constexpr int64_t kReducingBlocks = 2;

/// Upper bound on the tiles of a launch with several slices: each of these tiles needs a ticket.
constexpr int64_t kTileTickets = 4096;

ValueType value_type(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return ValueType::kFloat;
    case at::kDouble:
      return ValueType::kDouble;
    case at::kHalf:
      return ValueType::kHalf;
    case at::kBFloat16:
      return ValueType::kBFloat16;
    case at::kInt:
      return ValueType::kInt;
    case at::kLong:
      return ValueType::kLong;
    default:
      throw base::UserError(
          fmt::format("SyncBatchNorm: a tensor on {} has dtype {}; use float32, "
                      "float64, float16 or bfloat16",
                      tensor.device().str(), c10::toString(tensor.scalar_type())));
  }
}

/// @param tensor [C] or a scalar; may be undefined
ChannelValues channel_values(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  const at::Tensor values = tensor.detach().view(-1);
  return {values.data_ptr(), value_type(values), values.stride(0)};
}

/// channel_values() of a tensor that the kernel changes. Tells autograd about the change, as an
/// operator does.
ChannelValues changed_values(const at::Tensor& tensor) {
  if (tensor.defined()) tensor.unsafeGetTensorImpl()->bump_version();
  return channel_values(tensor);
}

/// Tickets for the kernels of the current stream. A CUDA graph has its own, which each replay
/// clears: it may replay beside kernels of the stream that captured it.
unsigned* tickets() {
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long capture = 0;
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &capture));
  if (status == cudaStreamCaptureStatusNone) capture = 0;

  struct Workspace {
    unsigned long long capture = 0;
    at::Tensor tickets;
  };
  static std::mutex mutex;
  // By device, stream, and whether it captures. Never freed: threads may outlive static
  // destructors.
  using Key = std::tuple<c10::DeviceIndex, c10::StreamId, bool>;
  static auto* const workspaces = new std::map<Key, Workspace>();
  const std::lock_guard lock(mutex);
  Workspace& workspace = (*workspaces)[{stream.device_index(), stream.id(), capture != 0}];
  if (!workspace.tickets.defined() || workspace.capture != capture) {
    workspace = {capture, at::zeros({1 + kTileTickets},
                                    at::TensorOptions(at::kInt).device(stream.device()))};
  }
  return static_cast<unsigned*>(workspace.tickets.mutable_data_ptr());
}

/// A tensor for a launch, with elements of the input's type in the input's memory format.
at::Tensor dense(const at::Tensor& tensor, const at::Tensor& input, const Shape& shape) {
  return tensor.detach().to(input.scalar_type()).contiguous(shape.format);
}

const void* data_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

LaunchShape launch_shape(const Shape& shape, int64_t blocks, std::vector<at::Tensor> tensors) {
  Layout layout{.rows = shape.rows,
                .n = shape.rows ? shape.n * shape.s : shape.n,
                .c = shape.c,
                .s = shape.rows ? 1 : shape.s};
  layout.aligned = true;
  for (const at::Tensor& tensor : tensors) {
    layout.aligned = layout.aligned && packs_are_aligned(layout, {data_or_null(tensor)});
  }
  int processors = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount,
                                        c10::cuda::current_device()));
  return {.layout = layout,
          .columns = layout.columns(),
          .slices = layout.slices(std::min(blocks * processors, kTileTickets)),
          .tickets = tickets()};
}

at::Tensor doubles(const at::Tensor& like, at::IntArrayRef size) {
  return at::empty(size, like.options().dtype(at::kDouble));
}

/// A workspace with a Part for each slice and channel; undefined for one slice.
template <class Part>
at::Tensor partials(const at::Tensor& like, const LaunchShape& shape) {
  if (shape.slices == 1) return {};
  constexpr auto kNumbers = static_cast<int64_t>(sizeof(Part) / sizeof(double));
  return doubles(like, {shape.slices, shape.layout.c, kNumbers});
}
template <class Part>
Part* parts_in(const at::Tensor& partials) {
  return partials.defined() ? static_cast<Part*>(partials.mutable_data_ptr()) : nullptr;
}

/// Launches a kernel on the current stream.
template <class... Arguments>
void start(const Arguments&... arguments) {
  launch(arguments..., c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

/// The PendingRow of a kernel that computes a row and may gather it.
/// @param tensors that the kernel reads and writes, the input first
template <class Arguments>
PendingRow pending(const at::Tensor& row, const Arguments& arguments,
                   std::vector<at::Tensor> tensors) {
  return {.row = row,
          .launch = [arguments, tensors = std::move(tensors)](const PeerGatherArguments* peers) {
            const at::Tensor& input = tensors.front();
            const c10::cuda::CUDAGuard guard(input.device());
            Arguments all = arguments;
            if (peers != nullptr) all.peers = *peers;
            start(all, value_type(input));
          }};
}

PendingRow moments(const at::Tensor& input) {
  const c10::cuda::CUDAGuard guard(input.device());
  const Shape shape(input);
  if (shape.c == 0) return {.row = at::zeros({1}, input.options().dtype(at::kDouble))};
  const at::Tensor x = dense(input, input, shape);
  const at::Tensor row = doubles(x, {2 * shape.c + 1});
  MomentsArguments arguments{.shape = launch_shape(shape, kReducingBlocks, {x}),
                             .input = x.const_data_ptr(),
                             .row = row.mutable_data_ptr<double>()};
  const at::Tensor workspace = partials<Moments>(x, arguments.shape);
  arguments.partials = parts_in<Moments>(workspace);
  return pending(row, arguments, {x, row, workspace});
}

MergeArguments merge_arguments(const at::Tensor& rows, int64_t channels, const at::Tensor& merged) {
  return {.channels = channels,
          .rows = rows.const_data_ptr<double>(),
          .ranks = rows.size(0),
          .row_stride = rows.stride(0),
          .merged = merged.mutable_data_ptr<double>()};
}

at::Tensor merge(const at::Tensor& rows, int64_t channels) {
  const c10::cuda::CUDAGuard guard(rows.device());
  if (channels == 0) return at::zeros({1}, rows.options());
  at::Tensor merged = doubles(rows, {2 * channels + 1});
  start(merge_arguments(rows, channels, merged));
  return merged;
}

Normalized forward(const at::Tensor& input, const at::Tensor& rows, const ForwardOptions& options) {
  const c10::cuda::CUDAGuard guard(input.device());
  const Shape shape(input);
  const Runs runs(shape);
  const at::Tensor x = dense(input, input, shape);
  Normalized result{.moments = doubles(x, {2 * shape.c + 1}),
                    .invstd = doubles(x, {shape.c}),
                    .output = {.values = at::empty_like(x)}};
  if (shape.c == 0) return result;
  Output& output = result.output;
  if (options.epilogue.relu) {
    output.relu_mask = at::empty({runs.count, packs_of(runs.values)}, x.options().dtype(at::kByte));
  }
  at::Tensor residual;
  if (options.epilogue.residual.defined()) residual = dense(options.epilogue.residual, x, shape);
  const RunningStatistics& running = options.running;
  // A counter on the CPU gets its new value back below, which waits for the GPU.
  at::Tensor counter;
  if (running.num_batches_tracked.defined()) counter = running.num_batches_tracked.to(x.device());
  std::vector<at::Tensor> tensors{x, output.values};
  if (residual.defined()) tensors.push_back(residual);
  start(ForwardArguments{.shape = launch_shape(shape, kBlocks, tensors),
                         .merge = merge_arguments(rows, shape.c, result.moments),
                         .input = x.const_data_ptr(),
                         .residual = data_or_null(residual),
                         .output = output.values.mutable_data_ptr(),
                         .relu_mask = options.epilogue.relu
                                          ? output.relu_mask.mutable_data_ptr<uint8_t>()
                                          : nullptr,
                         .invstd = result.invstd.mutable_data_ptr<double>(),
                         .weight = channel_values(options.weight),
                         .bias = channel_values(options.bias),
                         .eps = options.eps,
                         .running_mean = changed_values(running.mean),
                         .running_var = changed_values(running.var),
                         .num_batches_tracked = changed_values(counter),
                         .momentum = running.momentum.value_or(0),
                         .cumulative = !running.momentum && counter.defined()},
        value_type(x));
  if (counter.defined() && !counter.is_same(running.num_batches_tracked)) {
    running.num_batches_tracked.copy_(counter);
  }
  return result;
}

const uint8_t* mask_of(const OutputGradient& gradient) {
  return gradient.relu_mask.defined() ? gradient.relu_mask.const_data_ptr<uint8_t>() : nullptr;
}

detail::GradientSums backward_reduce(const OutputGradient& gradient, const at::Tensor& input,
                                     const at::Tensor& moments, const at::Tensor& invstd,
                                     const at::Tensor& before,
                                     std::optional<at::ScalarType> parameter_type) {
  const c10::cuda::CUDAGuard guard(input.device());
  const Shape shape(input);
  const at::Tensor x = dense(input, input, shape);
  const at::Tensor dy = dense(gradient.values, input, shape);
  const at::Tensor sums = doubles(x, {2 * shape.c});
  detail::GradientSums result{.sums = {.row = sums}};
  if (parameter_type) {
    const auto options = x.options().dtype(*parameter_type);
    result.parameters = {at::empty({shape.c}, options), at::empty({shape.c}, options)};
  }
  if (shape.c == 0) return result;
  ReduceArguments arguments{.shape = launch_shape(shape, kReducingBlocks, {x, dy}),
                            .gradient = dy.const_data_ptr(),
                            .relu_mask = mask_of(gradient),
                            .input = x.const_data_ptr(),
                            .moments = moments.const_data_ptr<double>(),
                            .invstd = invstd.const_data_ptr<double>(),
                            .before = static_cast<const double*>(data_or_null(before)),
                            .sums = sums.mutable_data_ptr<double>(),
                            .grad_weight = channel_values(result.parameters.weight),
                            .grad_bias = channel_values(result.parameters.bias)};
  const at::Tensor workspace = partials<ChannelSums>(x, arguments.shape);
  arguments.partials = parts_in<ChannelSums>(workspace);
  result.sums = pending(sums, arguments,
                        {x, dy, gradient.relu_mask, moments, invstd, before, sums, workspace,
                         result.parameters.weight, result.parameters.bias});
  return result;
}

at::Tensor backward_elementwise(OutputGradient& gradient, const at::Tensor& input,
                                const at::Tensor& weight, const at::Tensor& moments,
                                const at::Tensor& invstd, const at::Tensor& sums, bool keep) {
  const c10::cuda::CUDAGuard guard(input.device());
  const Shape shape(input);
  const at::Tensor x = dense(input, input, shape);
  const at::Tensor dy = dense(gradient.values, input, shape);
  at::Tensor dx = at::empty_like(x);
  at::Tensor masked_gradient = dy;
  const bool masks = keep && gradient.relu_mask.defined();
  if (masks) masked_gradient = at::empty_like(dy);
  if (x.numel() != 0) {
    start(ElementwiseArguments{.shape = launch_shape(shape, kBlocks, {x, dy, dx, masked_gradient}),
                               .gradient = dy.const_data_ptr(),
                               .relu_mask = mask_of(gradient),
                               .input = x.const_data_ptr(),
                               .grad_input = dx.mutable_data_ptr(),
                               .masked_gradient =
                                   masks ? masked_gradient.mutable_data_ptr() : nullptr,
                               .moments = moments.const_data_ptr<double>(),
                               .invstd = invstd.const_data_ptr<double>(),
                               .sums = sums.const_data_ptr<double>(),
                               .ranks = sums.size(0),
                               .weight = channel_values(weight)},
          value_type(x));
  }
  if (keep) gradient = {masked_gradient, at::Tensor()};
  return dx;
}

// A single rank uses the same kernels. Whether cuDNN's are faster there has not been measured.
constexpr BatchNormKernels kKernels{.moments = moments,
                                    .merge = merge,
                                    .forward = forward,
                                    .backward_reduce = backward_reduce,
                                    .backward_elementwise = backward_elementwise};

}  // namespace
}  // namespace syncbn::dist::detail::cuda

extern "C" __attribute__((visibility("default"))) const void* syncbn_cuda_batch_norm() {
  return &syncbn::dist::detail::cuda::kKernels;
}
