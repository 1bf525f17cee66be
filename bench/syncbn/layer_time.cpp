// Times ResNet-50's batch-norm layers alone, forward and backward: SyncBatchNorm beside
// torch::nn::BatchNorm2d, and SyncBatchNorm with fused addition and ReLU of the residual blocks
// beside the same operations apart. As in a step, all layers run forward, then all backward. Takes
// turns, and prints medians of the rounds as JSON for run.py.
//
//   layer_time [ROUNDS] [--keep_memory] [--threads N]
//
// On one thread it measures processor time, on several threads wall-clock time.
// --keep_memory: malloc keeps freed memory, as in `train`, so that page faults count for neither
// side.
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <torch/nn/modules/batchnorm.h>

#include <syncbn/base/heap.h>
#include <syncbn/dist/sync_batch_norm.h>

#include "../median.h"
#include "../resnet50_layers.h"

namespace {

using syncbn::bench::median;
using syncbn::dist::SyncBatchNorm;
using syncbn::dist::SyncBatchNormOptions;

using syncbn::bench::kResnet50Layers;
using syncbn::bench::Shape;

// The last layers of ResNet-50's blocks, which the addition and ReLU follow.
constexpr Shape kLast[] = {{256, 56, 3}, {512, 28, 4}, {1024, 14, 6}, {2048, 7, 3}};
constexpr int64_t kBatch = 4;

/// On one thread the processor time of this process, which other processes do not affect.
double now_in_milliseconds() {
  timespec time{};
  ::clock_gettime(at::get_num_threads() == 1 ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_nsec) * 1e-6;
}

/// Tensors of one layer, the same for both sides.
struct Data {
  at::Tensor input, residual, gradient;
};

std::vector<Data> make_data(const Shape* shapes, size_t count, at::MemoryFormat format) {
  std::vector<Data> data;
  for (const Shape* shape = shapes; shape != shapes + count; ++shape) {
    const auto random = [&] {
      return at::randn({kBatch, shape->channels, shape->size, shape->size}).contiguous(format);
    };
    for (int i = 0; i < shape->count; ++i) {
      data.push_back({random().requires_grad_(), random().requires_grad_(), random()});
    }
  }
  return data;
}

/// Runs all layers of a network once. Returns milliseconds. forward(i, data) runs the i-th layer.
using Forward = std::function<at::Tensor(size_t, const Data&)>;
double step(const std::vector<Data>& data, const Forward& forward) {
  const double begin = now_in_milliseconds();
  std::vector<at::Tensor> outputs;
  for (size_t i = 0; i < data.size(); ++i) outputs.push_back(forward(i, data[i]));
  for (size_t i = data.size(); i-- > 0;) {
    outputs.back().backward(data[i].gradient);
    outputs.pop_back();
    data[i].input.mutable_grad() = at::Tensor();
    data[i].residual.mutable_grad() = at::Tensor();
  }
  return now_in_milliseconds() - begin;
}

std::string compare(const std::vector<Data>& data, const Forward& ours, const Forward& other,
                    int rounds) {
  std::vector<double> own_times;
  std::vector<double> other_times;
  std::vector<double> ratios;
  for (int round = -1; round < rounds; ++round) {
    const bool first = round % 2 == 0;
    double own_time = first ? step(data, ours) : 0;
    const double other_time = step(data, other);
    if (!first) own_time = step(data, ours);
    if (round < 0) continue;
    own_times.push_back(own_time);
    other_times.push_back(other_time);
    ratios.push_back(own_time / other_time);
  }
  return fmt::format(R"({{"ms": [{:.2f}, {:.2f}], "ratio": {:.3f}}})", median(own_times),
                     median(other_times), median(ratios));
}

template <class Layer>
std::vector<Layer> make_layers(const std::vector<Data>& data) {
  std::vector<Layer> layers;
  layers.reserve(data.size());
  for (const Data& one : data) layers.emplace_back(one.input.size(1));
  return layers;
}

std::string compare_layers(at::MemoryFormat format, int rounds) {
  const auto data = make_data(kResnet50Layers, std::size(kResnet50Layers), format);
  auto own = make_layers<SyncBatchNorm>(data);
  auto other = make_layers<torch::nn::BatchNorm2d>(data);
  return compare(
      data, [&](size_t i, const Data& one) { return own[i](one.input); },
      [&](size_t i, const Data& one) { return other[i](one.input); }, rounds);
}

std::string compare_fused(at::MemoryFormat format, int rounds) {
  const auto data = make_data(kLast, std::size(kLast), format);
  auto apart = make_layers<SyncBatchNorm>(data);
  std::vector<SyncBatchNorm> fused;
  fused.reserve(data.size());
  for (const Data& one : data) {
    fused.emplace_back(SyncBatchNormOptions(one.input.size(1)).fuse_relu(true));
  }
  return compare(
      data, [&](size_t i, const Data& one) { return fused[i](one.input, one.residual); },
      [&](size_t i, const Data& one) { return apart[i](one.input).add_(one.residual).relu_(); },
      rounds);
}

}  // namespace

int main(int argc, char** argv) {
  int rounds = 15;
  int threads = 1;
  for (int i = 1; i < argc; ++i) {
    if (argv[i] == std::string("--keep_memory")) {
      syncbn::base::keep_freed_memory();
    } else if (argv[i] == std::string("--threads") && i + 1 < argc) {
      threads = std::max(1, std::atoi(argv[++i]));
    } else {
      rounds = std::max(1, std::atoi(argv[i]));
    }
  }
  at::set_num_threads(threads);
  constexpr auto kPlanes = at::MemoryFormat::Contiguous;
  constexpr auto kRows = at::MemoryFormat::ChannelsLast;
  fmt::print(R"({{"layers, contiguous": {}, "layers, channels-last": {}, )"
             R"("fused, contiguous": {}, "fused, channels-last": {}}})"
             "\n",
             compare_layers(kPlanes, rounds), compare_layers(kRows, rounds),
             compare_fused(kPlanes, rounds), compare_fused(kRows, rounds));
}
