// The time of ResNet-50's 53 batch-norm layers, forward and backward, in SyncBatchNorm and in
// torch::nn::BatchNorm2d: alone, one thread, batch 4 at 224 x 224, by turns; medians of the rounds.
//
//   layer_time [ROUNDS]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <torch/nn/modules/batchnorm.h>

#include <syncbn/dist/sync_batch_norm.h>

namespace {

struct Shape {
  int64_t channels, size;
  int count;
};

// A bottleneck has two narrow layers and a wide one; the first of each stage one more, and its
// first layer still sees the size of the stage before.
constexpr Shape kShapes[] = {{64, 112, 1},  {64, 56, 6},  {256, 56, 4}, {128, 56, 1},
                             {128, 28, 7},  {512, 28, 5}, {256, 28, 1}, {256, 14, 11},
                             {1024, 14, 7}, {512, 14, 1}, {512, 7, 5},  {2048, 7, 4}};
constexpr int64_t kBatch = 4;

template <class Layer>
double milliseconds(Layer& layer, const at::Tensor& input, const at::Tensor& gradient) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  layer->forward(input).backward(gradient);
  const std::chrono::duration<double, std::milli> time = Clock::now() - begin;
  input.mutable_grad() = at::Tensor();
  return time.count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void measure(at::MemoryFormat format, const char* name, int rounds) {
  double ours = 0;
  double theirs = 0;
  for (const Shape& shape : kShapes) {
    const auto random = [&] {
      return at::randn({kBatch, shape.channels, shape.size, shape.size}).contiguous(format);
    };
    const at::Tensor input = random().requires_grad_();
    const at::Tensor gradient = random();
    syncbn::dist::SyncBatchNorm own(shape.channels);
    torch::nn::BatchNorm2d other(shape.channels);
    std::vector<double> own_times;
    std::vector<double> other_times;
    for (int round = -2; round < rounds; ++round) {
      const double own_time = milliseconds(own, input, gradient);
      const double other_time = milliseconds(other, input, gradient);
      if (round < 0) continue;
      own_times.push_back(own_time);
      other_times.push_back(other_time);
    }
    std::printf("%-13s [%ld, %4ld, %3ld, %3ld] x %2d   %7.3f ms  %7.3f ms  %.2f\n", name, kBatch,
                shape.channels, shape.size, shape.size, shape.count, median(own_times),
                median(other_times), median(own_times) / median(other_times));
    ours += shape.count * median(own_times);
    theirs += shape.count * median(other_times);
  }
  std::printf("%-13s all 53: SyncBatchNorm %.1f ms, BatchNorm2d %.1f ms, ratio %.2f\n", name, ours,
              theirs, ours / theirs);
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 9;
  at::set_num_threads(1);
  measure(at::MemoryFormat::Contiguous, "contiguous", rounds);
  measure(at::MemoryFormat::ChannelsLast, "channels_last", rounds);
}
