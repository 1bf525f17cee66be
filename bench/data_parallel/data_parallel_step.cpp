// Executes N training steps of one job for each line "steps N" of standard input. run.py drives it.
#include <fmt/format.h>

#include <chrono>
#include <functional>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/parallel/data_parallel.h>

#include <syncbn/base/heap.h>
#include <syncbn/dist/data_parallel.h>
#include <syncbn/dist/ddp.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/models/model.h>
#include <syncbn/train/optimizer.h>

#include "../components.h"

namespace {

namespace dist = syncbn::dist;
namespace models = syncbn::models;
namespace nn = torch::nn;
namespace train = syncbn::train;

constexpr int64_t kClasses = 10;

/// The digits network as a module that torch::nn::parallel::data_parallel can clone.
struct DigitsImpl : nn::Cloneable<DigitsImpl> {
  DigitsImpl() { reset(); }
  void reset() override {
    constexpr int64_t kWidth = 16;
    int64_t inputs = 1;
    for (size_t i = 0; i < 3; ++i) {
      const int64_t outputs = kWidth << i;
      conv[i] =
          register_module(fmt::format("conv{}", i + 1),
                          nn::Conv2d(nn::Conv2dOptions(inputs, outputs, 3).padding(1).bias(false)));
      bn[i] = register_module(fmt::format("bn{}", i + 1), nn::BatchNorm2d(outputs));
      inputs = outputs;
    }
    fc = register_module("fc", nn::Linear(inputs, kClasses));
  }
  at::Tensor forward(at::Tensor x) {
    for (size_t i = 0; i < 3; ++i) {
      x = bn[i]->forward(conv[i]->forward(x)).relu_();
      if (i == 1) x = at::max_pool2d(x, 2);
    }
    return fc->forward(x.mean({2, 3}));
  }
  nn::Conv2d conv[3] = {nullptr, nullptr, nullptr};
  nn::BatchNorm2d bn[3] = {nullptr, nullptr, nullptr};
  nn::Linear fc{nullptr};
};

const std::vector<at::Device> kTwoCpus(2, at::kCPU);

/// Steps of a network on one batch.
class Job {
 public:
  Job(const nn::Module& net, at::Tensor input, std::function<at::Tensor(const at::Tensor&)> forward)
      : input_(std::move(input)), forward_(std::move(forward)) {
    target_ = at::arange(input_.size(0)) % kClasses;
    train::NamedTensors parameters;
    for (const auto& item : net.named_parameters()) {
      parameters.emplace_back(item.key(), item.value());
    }
    optimizer_ = syncbn::bench::component<train::OptimizerKind>("{type: sgd, momentum: 0.9}")
                     .make(parameters);
    parameters_ = net.parameters();
  }

  std::string steps(int count) {
    if (dist::is_initialized()) dist::barrier();
    const auto begin = std::chrono::steady_clock::now();
    double loss = 0;
    for (int i = 0; i < count; ++i) {
      for (at::Tensor& parameter : parameters_) parameter.mutable_grad() = at::Tensor();
      const at::Tensor value = at::cross_entropy_loss(forward_(input_), target_);
      value.backward();
      optimizer_->step(1e-3);
      loss = value.item<double>();
    }
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    return fmt::format(R"({{"seconds": {}, "loss": {}}})", took.count() / count, loss);
  }

 private:
  at::Tensor input_, target_;
  std::function<at::Tensor(const at::Tensor&)> forward_;
  std::unique_ptr<train::Optimizer> optimizer_;
  std::vector<at::Tensor> parameters_;
};

Job digits(const std::string& mode, int64_t batch) {
  const auto net = std::make_shared<DigitsImpl>();
  const at::Tensor input = at::randn({batch, 1, 8, 8});
  if (mode == "torch") {
    // What data_parallel() does, except its Scatter and Gather, which need GPUs.
    return {*net, input, [net](const at::Tensor& x) {
              auto replicas = nn::parallel::replicate(net, kTwoCpus);
              return at::cat(nn::parallel::parallel_apply(replicas, x.chunk(2)));
            }};
  }
  const auto dp = std::make_shared<dist::DataParallel<DigitsImpl>>(
      net, dist::DataParallelOptions{.device_ids = kTwoCpus});
  return {*net, input, [dp](const at::Tensor& x) { return dp->forward(x); }};
}

Job resnet(const std::string& mode, int64_t batch, models::Norm norm) {
  const auto make = [&] {
    return syncbn::bench::component<models::ModelKind>("{type: resnet18, small_input: true}")
        .make(
            models::ModelArgs{.num_classes = kClasses, .sample_shape = {3, 32, 32}, .norm = norm});
  };
  const std::shared_ptr<models::Model> net = make();
  if (mode == "ddp") {
    dist::init_process_group({.backend = "gloo"});
    const auto ddp = std::make_shared<dist::DistributedDataParallel<models::Model>>(net);
    return {*net, at::randn({batch / 2, 3, 32, 32}),
            [ddp](const at::Tensor& x) { return ddp->forward(x); }};
  }
  const auto dp = std::make_shared<dist::DataParallel<models::Model>>(
      std::vector<std::shared_ptr<models::Model>>{net, make()},
      dist::DataParallelOptions{.device_ids = kTwoCpus});
  return {*net, at::randn({batch, 3, 32, 32}),
          [dp](const at::Tensor& x) { return dp->forward(x); }};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    fmt::print(stderr, "usage: data_parallel_step digits|resnet18 dp|ddp|torch BATCH sync|local\n");
    return 2;
  }
  const std::string model = argv[1];
  const std::string mode = argv[2];
  syncbn::base::keep_freed_memory();  // as `train` does
  at::set_num_threads(mode == "ddp" ? 1 : 2);
  const models::Norm norm =
      argv[4] == std::string("sync") ? models::Norm::kSync : models::Norm::kLocal;
  Job job = model == "digits" ? digits(mode, std::stoll(argv[3]))
                              : resnet(mode, std::stoll(argv[3]), norm);
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string command;
    int count = 0;
    words >> command >> count;
    std::cout << job.steps(count) << std::endl;
  }
  dist::destroy_process_group();
  return 0;
}
