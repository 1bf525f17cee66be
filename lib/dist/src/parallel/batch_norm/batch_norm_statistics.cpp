#include <syncbn/dist/batch_norm_statistics.h>

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/collectives.h>

#include <string>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>
#include <torch/csrc/jit/api/module.h>

#include "batch_norm/convert.h"
#include "batch_norm/named_layers.h"
#include "batch_norm/statistics_scopes.h"

namespace syncbn::dist {
namespace {

using Tensors = std::vector<at::Tensor>;

/// Averages or broadcasts the running statistics in one message, as float64, which holds the other
/// floating-point types exactly.
void distribute(const std::vector<detail::NamedTensor>& all_buffers, bool reduce,
                const GroupOrDefault& group) {
  Tensors buffers;
  for (const auto& [name, buffer] : all_buffers) {
    const bool is_statistic = name.ends_with("running_mean") || name.ends_with("running_var");
    if (is_statistic && buffer.defined()) buffers.push_back(buffer);
  }
  if (buffers.empty() || world_size(group) == 1) return;
  const at::NoGradGuard no_grad;
  Tensors flat;
  for (const at::Tensor& buffer : buffers) {
    flat.push_back(buffer.to(buffers[0].device(), at::kDouble).flatten());
  }
  at::Tensor all = at::cat(flat);
  if (reduce) {
    all_reduce(all, c10d::ReduceOp::SUM, group);
    all.div_(world_size(group));
  } else {
    broadcast(all, 0, group);
  }
  int64_t begin = 0;
  for (const at::Tensor& buffer : buffers) {
    buffer.copy_(all.narrow(0, begin, buffer.numel()).view(buffer.sizes()));
    begin += buffer.numel();
  }
}

struct Layer {
  std::string name;
  at::Tensor running_mean;
  at::Tensor running_var;
};

/// The layers whose statistics update_bn_stats() computes. While one lives, libtorch's own layers
/// are converted, without exchange, because only converted layers use a BatchStatisticsRecorder.
class RecordedLayers {
 public:
  explicit RecordedLayers(const torch::nn::Module& module) {
    detail::install_operators();
    detail::for_each_named_module(module, [this](const auto& name, const auto& one) {
      if (!one.is_training()) return;
      const detail::NormTensors tensors = detail::norm_tensors(one);
      if (one.template as<SyncBatchNormImpl>() != nullptr ||
          detail::converted_group(tensors.running_mean, tensors.weight)) {
        add(name, tensors);
        return;
      }
      detail::visit_batch_norm(one, [&](const auto& layer) {
        add(name, tensors);
        convert(name, layer);
      });
    });
  }
  RecordedLayers(const RecordedLayers&) = delete;
  RecordedLayers& operator=(const RecordedLayers&) = delete;
  ~RecordedLayers() {
    for (const auto& [mean, weight] : converted_) detail::unregister_layer(mean, weight);
  }

  const std::vector<Layer>& all() const { return layers_; }

 private:
  void add(const std::string& name, const detail::NormTensors& layer) {
    if (layer.running_mean.defined()) {
      layers_.push_back({name, layer.running_mean, layer.running_var});
    }
  }

  template <class Module>
  void convert(const std::string& name, const Module& layer) {
    if (!layer.running_mean.defined()) return;
    detail::register_layer(
        layer.running_mean, layer.weight,
        {.name = std::make_shared<detail::LayerName>(detail::LayerName{.given = name}),
         .group = {},
         .timeout = {},
         .is_training = [] { return true; },
         .num_batches_tracked = [counter = layer.num_batches_tracked] { return counter; },
         .is_local = true});
    converted_.emplace_back(layer.running_mean, layer.weight);
  }

  std::vector<Layer> layers_;
  std::vector<std::pair<at::Tensor, at::Tensor>> converted_;
};

/// The moments of several batches of a layer.
at::Tensor merged(const Tensors& batches, int64_t channels) {
  return detail::batch_norm_kernels(at::kCPU).merge(at::stack(batches).cpu(), channels, /*eps=*/0);
}

}  // namespace

void distribute_bn(torch::nn::Module& module, bool reduce, const GroupOrDefault& group) {
  distribute(detail::distinct(module.named_buffers()), reduce, group);
}

void distribute_bn(torch::jit::Module& module, bool reduce, const GroupOrDefault& group) {
  distribute(detail::distinct(module.named_buffers()), reduce, group);
}

void update_bn_stats(torch::nn::Module& module, const std::function<void(int64_t i)>& forward,
                     int64_t num_iters) {
  if (num_iters < 1) {
    throw base::UserError(
        fmt::format("update_bn_stats: num_iters must be positive, got {}", num_iters));
  }
  const at::NoGradGuard no_grad;
  const RecordedLayers layers(module);
  detail::BatchStatisticsRecorder recorder;
  for (int64_t i = 0; i < num_iters; ++i) forward(i);
  // Change no layer if one of them fails.
  Tensors found;
  for (const Layer& layer : layers.all()) {
    const auto& batches = recorder.batches[layer.running_mean.unsafeGetTensorImpl()];
    found.push_back(batches.empty() ? at::Tensor() : merged(batches, layer.running_mean.numel()));
    if (!batches.empty() && found.back()[-1].item<double>() < 2) {
      throw base::UserError(fmt::format(
          "update_bn_stats: {} batches have fewer than two values per channel for layer '{}'",
          num_iters, layer.name));
    }
  }
  for (size_t i = 0; i < found.size(); ++i) {
    if (!found[i].defined()) continue;  // a layer that forward did not run
    const Layer& layer = layers.all()[i];
    const int64_t channels = layer.running_mean.numel();
    layer.running_mean.copy_(found[i].narrow(0, 0, channels));
    layer.running_var.copy_(found[i].narrow(0, channels, channels) / (found[i][-1] - 1));
  }
}

}  // namespace syncbn::dist
