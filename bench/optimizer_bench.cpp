// Times a step of the optimizers with torch's fused operators, and operation by operation.
#include <benchmark/benchmark.h>

#include <ATen/Functions.h>

#include <syncbn/base/env.h>
#include <syncbn/models/model.h>
#include <syncbn/train/optimizer.h>

#include "components.h"

namespace {

namespace models = syncbn::models;
namespace train = syncbn::train;
using syncbn::bench::component;

void step(benchmark::State& state, const std::string& model, const std::string& optimizer) {
  const auto net =
      component<models::ModelKind>(model).make(models::ModelArgs{.sample_shape = {3, 32, 32}});
  train::NamedTensors parameters;
  for (const auto& item : net->named_parameters()) {
    item.value().mutable_grad() = at::randn_like(item.value());
    parameters.emplace_back(item.key(), item.value());
  }
  const auto made = component<train::OptimizerKind>(optimizer).make(parameters);
  made->step(made->base_lr());
  for (auto _ : state) made->step(made->base_lr());
}

const std::string kSgd = "type: sgd, lr: 1e-4, momentum: 0.9, weight_decay: 1e-4";
const std::string kAdamw = "type: adamw, lr: 1e-4";

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  // Under the launcher, only rank 0 measures: an optimizer does not communicate.
  if (syncbn::base::env("RANK").value_or("0") != "0") return 0;
  for (const std::string model : {"digits", "resnet18", "resnet50"}) {
    for (const auto& [name, options] : {std::pair("sgd", kSgd), std::pair("adamw", kAdamw)}) {
      for (const std::string fused : {"true", "false"}) {
        const std::string optimizer = "{" + options + ", fused: " + fused + "}";
        benchmark::RegisterBenchmark(
            (model + "/" + name + (fused == "true" ? "/fused" : "/foreach")).c_str(),
            [=](benchmark::State& state) { step(state, model, optimizer); })
            ->Unit(benchmark::kMillisecond)
            ->UseRealTime();
      }
    }
  }
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
