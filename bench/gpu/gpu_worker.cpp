// Ranks, each on a GPU, that execute commands from rank 0's standard input. Rank 0 answers each
// line with a line of JSON. bench/gpu/run.py drives this program and its counterpart in Python
// (gpu_worker.py).
//
// These prepare a pass to measure, in bf16 and channels-last:
//   network BATCH SIZE sync|local   a step of ResNet-50 for images of SIZE pixels, in
//                                   DistributedDataParallel on several ranks
//   layers BATCH DIVISOR            SyncBatchNorm + ReLU of ResNet-50's layers; channels and sizes
//                                   are divided
//   keep NAME, use NAME             keeps the last prepared pass, prepares a kept one
// These measure it:
//   time COUNT    seconds of a pass
//   trace COUNT   a pass's kernels, copies and waits, by CUPTI or by the fake CUDA devices
//   memory        free bytes of the GPU's memory
#include <fmt/format.h>

#include <chrono>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <kineto/ActivityType.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <syncbn/base/error.h>
#include <syncbn/base/log.h>
#include <syncbn/dist/collectives.h>
#include <syncbn/dist/ddp.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/dist/sync_batch_norm.h>
#include <syncbn/models/memory_format.h>
#include <syncbn/models/model.h>
#include <syncbn/train/optimizer.h>

#include "../components.h"
#include "../resnet50_layers.h"
#include "fake_cuda/counts.h"

namespace {

namespace dist = syncbn::dist;
namespace models = syncbn::models;
using syncbn::bench::component;
using syncbn::bench::kResnet50Layers;

constexpr auto kRows = at::MemoryFormat::ChannelsLast;

/// A group of two ranks for a single process, which exchanges with itself over NCCL: its row also
/// stands in for the other rank's. NCCL refuses two ranks on one GPU, and a group of one rank
/// exchanges nothing.
class WithItself : public c10d::Backend {
 public:
  explicit WithItself(c10::intrusive_ptr<c10d::Backend> nccl)
      : Backend(/*rank=*/0, /*size=*/2), nccl_(std::move(nccl)) {}

  static dist::ProcessGroupPtr make_group() {
    auto group = c10::make_intrusive<c10d::ProcessGroup>(/*rank=*/0, /*size=*/2);
    const auto backend =
        c10::make_intrusive<WithItself>(dist::default_group()->getBackend(at::kCUDA));
    group->setBackend(at::kCUDA, c10d::ProcessGroup::BackendType::CUSTOM, backend);
    group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
    return group;
  }

  const std::string getBackendName() const override { return "with_itself"; }

  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& all, at::Tensor& own,
                                                 const c10d::AllgatherOptions& options) override {
    const at::Tensor rows = all.view({2, -1});
    at::Tensor first = rows[0];
    at::Tensor values = own.view({-1});
    rows[1].copy_(values);
    return nccl_->_allgather_base(first, values, options);
  }

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    return nccl_->allreduce(tensors, options);
  }

 private:
  const c10::intrusive_ptr<c10d::Backend> nccl_;
};

/// Mixed precision in bf16, as `amp: bf16` of `train`.
class Autocast {
 public:
  Autocast() {
    at::autocast::set_autocast_enabled(at::kCUDA, true);
    at::autocast::set_autocast_dtype(at::kCUDA, at::kBFloat16);
    at::autocast::increment_nesting();
  }
  ~Autocast() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCUDA, false);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;
};

at::Tensor random_images(int64_t batch, int64_t channels, int64_t size, at::ScalarType type,
                         at::MemoryFormat format) {
  return at::randn({batch, channels, size, size}, at::device(at::kCUDA).dtype(type))
      .contiguous(format);
}

using Pass = std::function<void()>;

Pass network(int64_t batch, int64_t size, bool sync) {
  std::shared_ptr<models::Model> net =
      component<models::ModelKind>("{type: resnet50}")
          .make(models::ModelArgs{.num_classes = 10,
                                  .sample_shape = {3, size, size},
                                  .norm = sync ? models::Norm::kSync : models::Norm::kLocal});
  net->to(at::kCUDA);
  models::to_memory_format(*net, kRows);
  syncbn::train::NamedTensors parameters;
  for (const auto& item : net->named_parameters())
    parameters.emplace_back(item.key(), item.value());
  const std::shared_ptr<syncbn::train::Optimizer> optimizer =
      component<syncbn::train::OptimizerKind>("{type: sgd, momentum: 0.9, fused: true}")
          .make(parameters);
  const at::Tensor input = random_images(batch, 3, size, at::kFloat, kRows);
  const at::Tensor target = at::arange(batch, at::device(at::kCUDA).dtype(at::kLong)) % 10;
  using Ddp = dist::DistributedDataParallel<models::Model>;
  const auto ddp = dist::world_size() > 1 ? std::make_shared<Ddp>(net) : nullptr;
  return [=] {
    for (const auto& [name, parameter] : parameters) parameter.mutable_grad() = at::Tensor();
    at::Tensor loss;
    {
      const Autocast autocast;
      loss = at::cross_entropy_loss(ddp ? ddp->forward(input) : net->forward(input), target);
    }
    loss.backward();
    optimizer->step(1e-3);
  };
}

struct Layer {
  dist::SyncBatchNorm norm;
  at::Tensor input, gradient;
};

/// As in a network's step, all layers go forward, and then all go backward.
Pass run_layers(std::vector<Layer> layers) {
  for (Layer& layer : layers) layer.norm->to(at::kCUDA);
  return [=] {
    std::vector<at::Tensor> outputs;
    for (Layer layer : layers) outputs.push_back(layer.norm(layer.input));
    for (auto layer = layers.rbegin(); layer != layers.rend(); ++layer) {
      outputs.back().backward(layer->gradient);
      outputs.pop_back();
      layer->input.mutable_grad() = at::Tensor();
      layer->norm->weight.mutable_grad() = at::Tensor();
      layer->norm->bias.mutable_grad() = at::Tensor();
    }
  };
}

/// @param count number of layers, which share one input
std::vector<Layer> make_layers(int count, int64_t batch, int64_t channels, int64_t size,
                               at::MemoryFormat format, const dist::ProcessGroupPtr& group) {
  const at::Tensor input =
      random_images(batch, channels, size, at::kBFloat16, format).requires_grad_();
  const at::Tensor gradient = random_images(batch, channels, size, at::kBFloat16, format);
  std::vector<Layer> layers;
  for (int i = 0; i < count; ++i) {
    layers.push_back(
        {dist::SyncBatchNorm(
             dist::SyncBatchNormOptions(channels).process_group(group).fuse_relu(true)),
         input, gradient});
  }
  return layers;
}

Pass resnet50_layers(int64_t batch, int64_t divisor, const dist::ProcessGroupPtr& group) {
  std::vector<Layer> all;
  for (const auto& [channels, size, count] : kResnet50Layers) {
    for (Layer& layer : make_layers(count, batch, channels / divisor,
                                    (size + divisor - 1) / divisor, kRows, group)) {
      all.push_back(std::move(layer));
    }
  }
  return run_layers(all);
}

double seconds_of(const Pass& pass, int count) {
  using Clock = std::chrono::steady_clock;
  c10::cuda::device_synchronize();
  const auto begin = Clock::now();
  for (int i = 0; i < count; ++i) pass();
  c10::cuda::device_synchronize();
  return std::chrono::duration<double>(Clock::now() - begin).count() / count;
}

std::string report(double kernels, double copies, double waits, int passes) {
  return fmt::format(R"({{"launches": {}, "copies": {}, "waits": {}}})", kernels / passes,
                     copies / passes, waits / passes);
}

/// The fake CUDA devices count each ATen operator as one kernel, and do not time kernels.
std::string trace_on_fake_devices(const Pass& pass, int count) {
  using fake_cuda::Count;
  const auto before = fake_cuda::counts();
  for (int i = 0; i < count; ++i) pass();
  const auto done = fake_cuda::counts() - before;
  const auto kernels = done[Count::kOperators];
  const auto copies = done[Count::kDeviceToDevice] + done[Count::kHostToDevice] +
                      done[Count::kDeviceToHost] + done[Count::kMemsets] +
                      done[Count::kCollectives];
  return report(static_cast<double>(kernels), static_cast<double>(copies),
                static_cast<double>(done.host_waits()), count);
}

std::string trace(const Pass& pass, int count) {
  pass();
  c10::cuda::device_synchronize();
  if (fake_cuda::counters() != nullptr) return trace_on_fake_devices(pass, count);
  namespace profiler = torch::autograd::profiler;
  using torch::profiler::impl::ActivityType;
  const torch::profiler::impl::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO);
  const std::set<ActivityType> activities{ActivityType::CPU, ActivityType::CUDA};
  profiler::prepareProfiler(config, activities);
  profiler::enableProfiler(config, activities);
  for (int i = 0; i < count; ++i) pass();
  const auto result = profiler::disableProfiler();
  const std::set<std::string> waiting{"cudaStreamSynchronize", "cudaEventSynchronize",
                                      "cudaDeviceSynchronize", "cudaMemcpy"};
  int kernels = 0;
  int copies = 0;
  int waits = -1;  // the profiler itself waits once when it stops
  for (const auto& event : result->events()) {
    const auto type = static_cast<libkineto::ActivityType>(event.activityType());
    if (type == libkineto::ActivityType::CONCURRENT_KERNEL) {
      ++kernels;
    } else if (type == libkineto::ActivityType::GPU_MEMCPY ||
               type == libkineto::ActivityType::GPU_MEMSET) {
      ++copies;
    } else if (type == libkineto::ActivityType::CUDA_RUNTIME) {
      waits += waiting.contains(event.name()) ? 1 : 0;
    }
  }
  return report(kernels, copies, std::max(waits, 0), count);
}

/// Returns a line of rank 0's standard input on all ranks; nothing at its end.
std::optional<std::string> next_line() {
  std::string line;
  const bool is_first = dist::rank() == 0;
  const bool has_line = is_first && std::getline(std::cin, line);
  at::Tensor size = at::scalar_tensor(has_line ? std::ssize(line) : -1, at::kLong);
  dist::broadcast(size, 0);
  if (size.item<int64_t>() < 0) return std::nullopt;
  line.resize(static_cast<size_t>(size.item<int64_t>()));
  at::Tensor bytes = at::from_blob(line.data(), {std::ssize(line)}, at::kByte);
  if (!line.empty()) dist::broadcast(bytes, 0);
  return line;
}

class Worker {
 public:
  std::string answer(std::istringstream words) {
    std::string command;
    std::string kind;
    int64_t batch = 0;
    int64_t size = 0;
    words >> command;
    if (command == "network") {
      words >> batch >> size >> kind;
      pass_ = network(batch, size, kind == "sync");
    } else if (command == "layers") {
      int64_t divisor = 1;
      words >> batch >> divisor;
      pass_ = resnet50_layers(batch, divisor, group_);
    } else if (command == "memory") {
      size_t free = 0;
      size_t total = 0;
      C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
      return fmt::format(R"({{"free": {}}})", free);
    } else if (command == "keep") {
      words >> kind;
      kept_[kind] = pass_;
    } else if (command == "use") {
      words >> kind;
      pass_ = kept_.at(kind);
    } else {
      int64_t count = 0;
      words >> count;
      if (command == "trace") return trace(pass_, static_cast<int>(count));
      if (command != "time") {
        throw syncbn::base::UserError(fmt::format("unknown command '{}'", command));
      }
      return fmt::format(R"({{"seconds": {}}})", seconds_of(pass_, static_cast<int>(count)));
    }
    return "{}";
  }

 private:
  const dist::ProcessGroupPtr group_ = WithItself::make_group();
  Pass pass_;
  std::map<std::string, Pass> kept_;
};

int run() {
  syncbn::base::init_logging();  // to stderr: answers are on stdout
  dist::init_process_group({.backend = "nccl"});
  at::globalContext().setBenchmarkCuDNN(true);
  {
    Worker worker;
    while (const auto line = next_line()) {
      const std::string answer = worker.answer(std::istringstream(*line));
      if (dist::rank() > 0) continue;
      fmt::print("{}\n", answer);
      std::fflush(stdout);
    }
  }
  dist::destroy_process_group();
  return 0;
}

}  // namespace

int main() {
  return syncbn::base::run_main("gpu_worker", run);
}
