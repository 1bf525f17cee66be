// Forward and backward of SyncBatchNorm beside torch::nn::BatchNorm2d, at shapes of ResNet-50.
//
// Alone, it shows what the layer costs by itself; under syncbn-launch, what the exchange adds.
// Every rank must run each layer as often as the others, hence the fixed number of iterations.
#include <benchmark/benchmark.h>

#include <cstdlib>

#include <ATen/Functions.h>
#include <torch/nn/modules/batchnorm.h>

#include <syncbn/dist/process_group.h>
#include <syncbn/dist/sync_batch_norm.h>

namespace {

template <class Layer>
void forward_and_backward(benchmark::State& state, Layer layer) {
  const auto channels = state.range(0);
  const auto size = state.range(1);
  const auto input = at::randn({8, channels, size, size}).requires_grad_();
  const auto grad = at::randn({8, channels, size, size});
  layer->forward(input).backward(grad);
  for (auto _ : state) {
    layer->forward(input).backward(grad);
  }
  state.SetItemsProcessed(state.iterations() * input.numel());
}

void batch_norm(benchmark::State& state) {
  forward_and_backward(state, torch::nn::BatchNorm2d(state.range(0)));
}

void sync_batch_norm(benchmark::State& state) {
  forward_and_backward(state, syncbn::dist::SyncBatchNorm(state.range(0)));
}

void resnet_shapes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"channels", "size"});
  bench->Args({64, 112})->Args({256, 56})->Args({512, 28})->Args({2048, 7});
  bench->Iterations(20)->Unit(benchmark::kMillisecond)->UseRealTime();
}

BENCHMARK(batch_norm)->Apply(resnet_shapes);
BENCHMARK(sync_batch_norm)->Apply(resnet_shapes);

/// Ranks above 0 measure as well, and say nothing.
class Silent : public benchmark::BenchmarkReporter {
  bool ReportContext(const Context& /*context*/) override { return true; }
  void ReportRuns(const std::vector<Run>& /*report*/) override {}
};

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  const auto group = syncbn::dist::init_process_group({.backend = "gloo"});
  if (syncbn::dist::rank(group) == 0) {
    benchmark::RunSpecifiedBenchmarks();
  } else {
    Silent silent;
    benchmark::RunSpecifiedBenchmarks(&silent);
  }
  syncbn::dist::destroy_process_group();
  return 0;
}
