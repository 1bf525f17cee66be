// Divides ResNet-50 between two devices, as in PyTorch's tutorial "Single-Machine Model Parallel
// Best Practices": plain, where one device waits for the other, and pipelined, where both work on
// parts of the batch. Prints the time per training step by the number of parts (micro-batches).
//
//     model_parallel [IMAGES [PIXELS [ROUNDS [CSV]]]]
//
// The halves run on two GPUs, or else both on the CPU with one core each.
#include <syncbn/base/log.h>
#include <syncbn/dist/pipeline_parallel.h>
#include <syncbn/models/resnet.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/ops/adaptive_avg_pool2d.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/max_pool2d.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/relu.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

namespace {

namespace dist = syncbn::dist;
namespace nn = torch::nn;

/// Also registers a child of `network` in `module`.
template <class Layer>
std::shared_ptr<Layer> take(nn::Module& module, const nn::Module& network,
                            const std::string& name) {
  return module.register_module(name,
                                std::dynamic_pointer_cast<Layer>(network.named_children()[name]));
}

/// The blocks [begin, end) of a ResNet stage.
nn::Sequential blocks(const nn::Module& network, const std::string& name, size_t begin,
                      size_t end) {
  const auto stage = std::dynamic_pointer_cast<nn::SequentialImpl>(network.named_children()[name]);
  nn::Sequential some;
  for (size_t i = begin; i < std::min(end, stage->size()); ++i) {
    some->push_back(*(stage->begin() + static_cast<std::ptrdiff_t>(i)));
  }
  return some;
}

// With the first block of layer3 in front, both halves take about the same time.
constexpr size_t kBlocksInFront = 1;

struct FrontImpl : nn::Module {
  explicit FrontImpl(const nn::Module& resnet)
      : conv1(take<nn::Conv2dImpl>(*this, resnet, "conv1")),
        bn1(take<nn::BatchNorm2dImpl>(*this, resnet, "bn1")),
        layer1(take<nn::SequentialImpl>(*this, resnet, "layer1")),
        layer2(take<nn::SequentialImpl>(*this, resnet, "layer2")),
        layer3(register_module("layer3", blocks(resnet, "layer3", 0, kBlocksInFront))) {}

  at::Tensor forward(const at::Tensor& images) {
    const at::Tensor stem = at::relu(bn1->forward(conv1->forward(images)));
    return layer3->forward(layer2->forward(layer1->forward(at::max_pool2d(stem, 3, 2, 1))));
  }

  std::shared_ptr<nn::Conv2dImpl> conv1;
  std::shared_ptr<nn::BatchNorm2dImpl> bn1;
  std::shared_ptr<nn::SequentialImpl> layer1, layer2;
  nn::Sequential layer3;
};

struct BackImpl : nn::Module {
  explicit BackImpl(const nn::Module& resnet)
      : layer3(register_module("layer3", blocks(resnet, "layer3", kBlocksInFront, SIZE_MAX))),
        layer4(take<nn::SequentialImpl>(*this, resnet, "layer4")),
        fc(take<nn::LinearImpl>(*this, resnet, "fc")) {}

  at::Tensor forward(const at::Tensor& features) {
    const at::Tensor last = layer4->forward(layer3->forward(features));
    return fc->forward(at::adaptive_avg_pool2d(last, {1, 1}).flatten(1));
  }

  nn::Sequential layer3;
  std::shared_ptr<nn::SequentialImpl> layer4;
  std::shared_ptr<nn::LinearImpl> fc;
};

at::Tensor loss_of(const at::Tensor& output, const at::Tensor& labels) {
  return at::cross_entropy_loss(output, labels);
}

double seconds_of(const std::function<double()>& step) {
  const auto begin = std::chrono::steady_clock::now();
  step();  // returns the loss as a number, so it waits for a GPU
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

int run(const std::vector<std::string>& arguments) {
  const auto number = [&](size_t index, int64_t otherwise) {
    return index < arguments.size() ? std::stoll(arguments[index]) : otherwise;
  };
  const int64_t images = number(0, 32);
  const int64_t pixels = number(1, 64);
  const int64_t rounds = number(2, 3);
  const bool has_gpus = at::globalContext().hasCUDA() && at::getNumGPUs() > 1;
  const std::vector<at::Device> devices =
      has_gpus ? std::vector<at::Device>{{at::kCUDA, 0}, {at::kCUDA, 1}}
               : std::vector<at::Device>(2, at::kCPU);
  if (!has_gpus) at::set_num_threads(1);

  const auto resnet = syncbn::models::resnet50();
  const auto front = std::make_shared<FrontImpl>(*resnet);
  const auto back = std::make_shared<BackImpl>(*resnet);
  front->to(devices[0]);
  back->to(devices[1]);
  const at::Tensor input = at::rand({images, 3, pixels, pixels});
  const at::Tensor labels = at::randint(1000, {images}, at::kLong);

  std::vector<int64_t> sizes{0};  // 0: not pipelined
  std::map<int64_t, std::function<double()>> steps;
  steps[0] = [&] {
    const at::Tensor features = front->forward(input.to(devices[0]));
    const at::Tensor loss = loss_of(back->forward(features.to(devices[1])), labels.to(devices[1]));
    loss.backward();
    return loss.item<double>();
  };
  for (int64_t count = 1; count <= images; count *= 2) {
    sizes.push_back(count);
    const auto pipeline = std::make_shared<dist::PipelineParallel>(dist::PipelineParallel(
        {{front, devices[0]}, {back, devices[1]}},
        {.micro_batches = count, .schedule = dist::PipelineSchedule::k1f1b}));
    steps[count] = [&, pipeline] { return pipeline->step(input, labels, loss_of); };
  }

  std::map<int64_t, std::vector<double>> seconds;
  std::ofstream csv;
  if (arguments.size() > 3) csv.open(arguments[3]);
  csv << "round,micro_batches,seconds\n";
  for (int64_t round = -1; round < rounds; ++round) {  // the first warms up
    for (const int64_t size : sizes) {
      const double time = seconds_of(steps[size]);
      if (round < 0) continue;
      seconds[size].push_back(time);
      csv << round << ',' << size << ',' << time << '\n';
    }
  }
  if (arguments.size() > 3 && !csv.flush()) {
    throw syncbn::base::UserError("cannot write '" + arguments[3] + "'");
  }

  std::printf("ResNet-50, %lld images of %lld x %lld, on %s and %s\n",
              static_cast<long long>(images), static_cast<long long>(pixels),
              static_cast<long long>(pixels), devices[0].str().c_str(), devices[1].str().c_str());
  std::printf("micro-batches s per step   times as fast\n");
  const double plain = median(seconds[0]);
  for (const int64_t size : sizes) {
    const std::string name = size == 0 ? "not pipelined" : std::to_string(size);
    const double time = median(seconds[size]);
    std::printf("%13s %10.3f %15.2f\n", name.c_str(), time, plain / time);
  }
  return 0;
}

}  // namespace

// Turns an error into one message and its exit code.
int main(int argc, char** argv) {
  return syncbn::base::run_main(
      "model_parallel", [&] { return run(std::vector<std::string>(argv + 1, argv + argc)); });
}
