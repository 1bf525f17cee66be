#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <syncbn/base/error.h>
#include <syncbn/dist/ddp.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/dist/tensor_tree.h>

namespace syncbn::dist {

namespace detail {
struct Pipeline;
}

/// The order in which a stage runs the micro-batches of a step.
enum class PipelineSchedule {
  /// All forwards, then all backwards (Huang et al., arXiv:1811.06965). A stage keeps the
  /// activations of all micro-batches.
  kGpipe,
  /// Each backward as early as possible (Narayanan et al., arXiv:1806.03377, with a flush at the
  /// end of each step): stage i of n keeps those of n - i micro-batches at most. As fast as kGpipe.
  k1f1b,
};

/// The samples over which batch normalisation in a stage computes its statistics.
enum class PipelineStatistics {
  /// Each micro-batch, on all ranks of the layer's group. Running statistics are updated with each.
  kMicroBatch,
  /// The whole batch. A stage with SyncBatchNorm or libtorch's BatchNorm1d, 2d or 3d runs it in one
  /// forward, and later stages wait for that. Only with kGpipe.
  kBatch,
};

/// Options of PipelineParallel.
struct PipelineOptions {
  /// The number of parts of a batch, as equal as possible. With m parts and n stages of equal time,
  /// each stage is idle for (n - 1) / (m + n - 1) of a step.
  int64_t micro_batches = 1;
  PipelineSchedule schedule = PipelineSchedule::kGpipe;
  PipelineStatistics statistics = PipelineStatistics::kMicroBatch;
  /// True: the loss is a mean over samples, so the losses of micro-batches are averaged, weighted
  /// by their numbers of samples. False: they are added up.
  bool average_losses = true;
  /// For PipelineParallel::across_ranks(): the ranks of the stages, in the order of the stages. No
  /// other thread may use the group during step() and forward().
  GroupOrDefault process_group = {};
  /// For across_ranks(): upper bound on the wait for another rank. Not given: the group's timeout.
  Timeout timeout = std::nullopt;
};

/// A part of a network and its device. Its input is the output of the stage before.
///
/// The module's forward takes an at::Tensor or a std::vector<at::Tensor>. It may return tensors in
/// containers, tuples and structs (see DistributedDataParallel): the next stage gets them in a
/// vector. The first stage gets one tensor, the last returns one. A stage must not change its input
/// in place.
class PipelineStage {
 public:
  using Tensors = std::vector<at::Tensor>;

  template <class Module>
  PipelineStage(const std::shared_ptr<Module>& module, at::Device device = at::kCPU)  // NOLINT
      : PipelineStage(module, device,
                      run<Module>([module](const auto& input) { return module->forward(input); })) {
  }
  template <class Module>
  PipelineStage(const torch::nn::ModuleHolder<Module>& module, at::Device device = at::kCPU)
      : PipelineStage(module.is_empty() ? nullptr : module.ptr(), device) {}
  /// The gradients are averaged once per step, in the backward of its last micro-batch. `ddp` must
  /// live as long as the stage. Not with DdpOptions::static_graph.
  template <class Module>
  PipelineStage(DistributedDataParallel<Module>& ddp, at::Device device = at::kCPU)  // NOLINT
      : PipelineStage(ddp.module_ptr(), device,
                      run<Module>([&ddp](const auto& input) { return ddp.forward(input); })) {
    ddp_ = &ddp;
  }

  bool is_empty() const { return module_ == nullptr; }
  const torch::nn::Module& module() const { return *module_; }
  at::Device device() const { return device_; }
  detail::DdpBase* ddp() const { return ddp_; }

  /// @throws base::UserError for several inputs if the module takes one
  Tensors forward(const Tensors& inputs) const { return forward_(inputs); }

 private:
  PipelineStage(std::shared_ptr<torch::nn::Module> module, at::Device device,
                std::function<Tensors(const Tensors&)> forward)
      : module_(std::move(module)), device_(device), forward_(std::move(forward)) {}

  template <class Module, class Forward>
  static auto run(Forward forward) {
    return [forward = std::move(forward)](const Tensors& inputs) {
      auto output = [&] {
        if constexpr (requires(Module & module) { module.forward(inputs.front()); }) {
          return forward(only(inputs));
        } else {
          return forward(inputs);
        }
      }();
      Tensors outputs;
      detail::for_each_tensor(output, [&](at::Tensor& one) { outputs.push_back(one); });
      return outputs;
    };
  }
  static const at::Tensor& only(const Tensors& inputs);

  std::shared_ptr<torch::nn::Module> module_;
  at::Device device_;
  std::function<Tensors(const Tensors&)> forward_;
  detail::DdpBase* ddp_ = nullptr;
};

/// A stage failed, with the message of its exception and its exit code.
class StageError : public base::Error {
 public:
  StageError(int stage, int exit_code, const std::string& message)
      : Error(message, exit_code), stage_(stage) {}

  int stage() const noexcept { return stage_; }

 private:
  int stage_;
};

/// Trains a network that is divided into stages on several devices. The devices work at the same
/// time, on different parts of a batch.
///
///     PipelineParallel pipeline({{front, at::Device("cuda:0")}, {back, at::Device("cuda:1")}},
///                               {.micro_batches = 8, .schedule = PipelineSchedule::k1f1b});
///     double loss = pipeline.step(images, labels, criterion);   // gradients are in the modules
///     optimizer.step();
///
/// In one process each stage has a thread of its own. The CPU may be given for several stages; each
/// gets a share of ATen's threads. Over a process group each rank has a stage:
///
///     // on rank 0
///     auto pipeline = PipelineParallel::across_ranks(front, {.micro_batches = 8});
///     // on rank 1
///     auto pipeline = PipelineParallel::across_ranks(back, {.micro_batches = 8});
///
/// Gradients are those of the whole network on the whole batch, except for batch normalisation (see
/// PipelineStatistics), and accumulate as in backward(). The input gets no gradient. After a
/// StageError, gradients of micro-batches before the failure may remain: call zero_grad() before
/// the next step.
///
/// Stages in one process communicate at the same time, so the DistributedDataParallel and
/// SyncBatchNorm layers of each stage need a process group of their own. Across ranks, these groups
/// must contain no rank with another stage of the pipeline.
///
/// Not thread-safe. Do not fork while it lives.
/// @throws base::UserError (constructors) when there is no stage, device or group, a module is not
///   on its device, or stages share a group; (step, forward) for fewer samples than micro-batches,
///   tensors that do not fit, or an object that was moved from; StageError, on all ranks, when a
///   stage throws or passes no gradients to the stages before it; PeerError when a rank ends or
///   does not arrive.
class PipelineParallel {
 public:
  /// Called with the last stage's output and the target for a micro-batch, on the last stage's
  /// thread and device; returns a scalar.
  using Loss = std::function<at::Tensor(const at::Tensor& output, const at::Tensor& target)>;

  explicit PipelineParallel(std::vector<PipelineStage> stages, const PipelineOptions& options = {});
  /// Collective: every rank passes its own stage.
  static PipelineParallel across_ranks(PipelineStage stage, const PipelineOptions& options = {});
  ~PipelineParallel();
  PipelineParallel(PipelineParallel&&) noexcept;
  PipelineParallel& operator=(PipelineParallel&&) noexcept;

  /// Forward and backward of a batch, divided along the first dimension. Across ranks, only the
  /// first stage uses `input`, and only the last uses `target` and `loss`. Returns when all stages
  /// are done.
  /// @return the batch's loss, on every rank
  double step(const at::Tensor& input, const at::Tensor& target, const Loss& loss);

  /// The output of the network for a batch, without a graph. Across ranks, only the last stage
  /// returns a defined tensor. A stage may run ahead of the next by all micro-batches.
  at::Tensor forward(const at::Tensor& input);

 private:
  explicit PipelineParallel(std::unique_ptr<detail::Pipeline> pipeline);
  detail::Pipeline& pipeline() const;

  std::unique_ptr<detail::Pipeline> pipeline_;
};

}  // namespace syncbn::dist
