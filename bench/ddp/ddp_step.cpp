// One rank of a DDP job. It executes commands from standard input, and answers each line with a
// line of JSON. bench/ddp/run.py drives this program and its counterpart in Python (ddp_step.py).
#include <fmt/format.h>
#include <sys/resource.h>

#include <chrono>
#include <iostream>
#include <sstream>
#include <vector>

#include <ATen/Functions.h>

#include <syncbn/base/heap.h>
#include <syncbn/dist/ddp.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/models/detector.h>
#include <syncbn/models/memory_format.h>
#include <syncbn/models/model.h>
#include <syncbn/train/optimizer.h>

#include "../components.h"
#include "../median.h"

namespace {

using syncbn::bench::component;
using syncbn::bench::median;
using syncbn::models::Model;
namespace dist = syncbn::dist;
namespace models = syncbn::models;
namespace train = syncbn::train;

constexpr double kLearningRate = 1e-3;
constexpr int64_t kNumClasses = 10;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

class Job {
 public:
  Job(const std::string& model, int64_t batch, int64_t size, const std::string& format, bool fused,
      models::Norm norm)
      : input_(at::empty({0})) {
    const int64_t channels = model == "digits" ? 1 : 3;
    const std::string stem = model != "digits" && size < 64 ? ", small_input: true" : "";
    at::manual_seed(0);
    net_ =
        component<models::ModelKind>(fmt::format("{{type: {}{}}}", model, stem))
            .make(models::ModelArgs{
                .num_classes = kNumClasses, .sample_shape = {channels, size, size}, .norm = norm});
    const auto memory_format = format == "default"         ? models::preferred_memory_format(*net_)
                               : format == "channels_last" ? at::MemoryFormat::ChannelsLast
                                                           : at::MemoryFormat::Contiguous;
    models::to_memory_format(*net_, memory_format);
    train::NamedTensors parameters;
    for (const auto& item : net_->named_parameters()) {
      parameters.emplace_back(item.key(), item.value());
    }
    optimizer_ = component<train::OptimizerKind>(
                     fmt::format("{{type: sgd, momentum: 0.9, fused: {}}}", fused))
                     .make(parameters);
    ddp_ = std::make_unique<dist::DistributedDataParallel<Model>>(net_);
    at::manual_seed(static_cast<uint64_t>(1 + dist::rank()));
    input_ = at::randn({batch, channels, size, size}).contiguous(memory_format);
    detector_ = dynamic_cast<const models::Detector*>(net_.get());
    if (detector_ != nullptr) {
      target_ = boxes(batch, static_cast<double>(size));
    } else if (net_->labels_pixels()) {
      target_ = (at::arange(batch * size * size) % kNumClasses).reshape({batch, size, size});
    } else {
      target_ = at::arange(batch) % kNumClasses;
    }
  }

  std::string steps(int count) {
    dist::barrier();
    const double begin = now();
    double loss = 0;
    for (int i = 0; i < count; ++i) {
      const at::Tensor value = forward();
      value.backward();
      optimizer_->step(kLearningRate);
      loss = value.item<double>();
    }
    return fmt::format(R"({{"seconds": {}, "loss": {}}})", (now() - begin) / count, loss);
  }

  /// Times backward with and without the exchange of gradients, by turns.
  std::string overlap(int count) {
    std::vector<double> with;
    std::vector<double> without;
    for (int i = 0; i < count; ++i) {
      with.push_back(backward_time());
      const auto guard = ddp_->no_sync();
      without.push_back(backward_time());
    }
    return fmt::format(R"({{"backward": {}, "no_sync": {}}})", median(with), median(without));
  }

 private:
  /// Three boxes in each image, in the form that Detector::loss() takes.
  static at::Tensor boxes(int64_t batch, double size) {
    const at::Tensor rows = at::tensor({0., 1.,   1.,  1.,   1.,   //
                                        1., 0.1,  0.1, 0.4,  0.5,  //
                                        2., 0.3,  0.2, 0.9,  0.8,  //
                                        3., 0.55, 0.6, 0.65, 0.7},
                                       at::kDouble)
                                .reshape({4, 5});
    return (rows * at::tensor({1., size, size, size, size}, at::kDouble)).repeat({batch, 1, 1});
  }

  at::Tensor forward() {
    ddp_->zero_grad();
    if (detector_ != nullptr) {
      return detector_->loss(ddp_->invoke(&Model::forward_all, input_), target_);
    }
    return at::cross_entropy_loss(ddp_->forward(input_), target_);
  }

  double backward_time() {
    const at::Tensor loss = forward();
    dist::barrier();
    const double begin = now();
    loss.backward();
    return now() - begin;
  }

  std::shared_ptr<Model> net_;
  const models::Detector* detector_ = nullptr;  ///< net_, if it is one
  std::unique_ptr<train::Optimizer> optimizer_;
  std::unique_ptr<dist::DistributedDataParallel<Model>> ddp_;
  at::Tensor input_;
  at::Tensor target_;
};

std::string all_reduce(int64_t bytes, int count) {
  at::Tensor tensor = at::ones({bytes / 4});
  std::vector<double> times;
  for (int i = 0; i < count; ++i) {
    dist::barrier();
    const double begin = now();
    dist::all_reduce(tensor);
    times.push_back(now() - begin);
    tensor.fill_(1);
  }
  return fmt::format(R"({{"seconds": {}}})", median(times));
}

std::string memory(double init_seconds) {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return fmt::format(R"({{"peak_mib": {}, "init_seconds": {}}})",
                     static_cast<double>(usage.ru_maxrss) / 1024, init_seconds);
}

}  // namespace

int main(int argc, char** argv) {
  const bool sync = argc == 7 && argv[6] == std::string("sync");
  if (argc != 6 && !sync) {
    fmt::print(stderr,
               "usage: ddp_step MODEL BATCH SIZE default|contiguous|channels_last FUSED [sync]\n");
    return 2;
  }
  if (argv[4] == std::string("default")) syncbn::base::keep_freed_memory();  // as `train` does
  const double begin = now();
  dist::init_process_group({.backend = "gloo"});
  const double init_seconds = now() - begin;
  Job job(argv[1], std::stoll(argv[2]), std::stoll(argv[3]), argv[4], argv[5] == std::string("1"),
          sync ? models::Norm::kSync : models::Norm::kLocal);
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string command;
    int64_t bytes = 0;
    int count = 0;
    words >> command;
    if (command == "all_reduce") words >> bytes;
    words >> count;
    const std::string answer = command == "steps"        ? job.steps(count)
                               : command == "overlap"    ? job.overlap(count)
                               : command == "all_reduce" ? all_reduce(bytes, count)
                                                         : memory(init_seconds);
    fmt::print("{}\n", answer);
    std::fflush(stdout);
  }
  dist::destroy_process_group();
  return 0;
}
