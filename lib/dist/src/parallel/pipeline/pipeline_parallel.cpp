#include <syncbn/dist/pipeline_parallel.h>

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <syncbn/dist/collectives.h>
#include <syncbn/dist/sync_batch_norm.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <mutex>
#include <optional>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/tensor.h>

#include "batch_norm/named_layers.h"
#include "batch_norm/statistics_scopes.h"
#include "device_threads/compute_threads.h"
#include "device_threads/named_error.h"
#include "groups/world.h"
#include "pipeline/schedule.h"
#include "pipeline/stage_run.h"
#include "pipeline/transfer.h"

namespace syncbn::dist {
namespace detail {
namespace {

using Tensors = std::vector<at::Tensor>;

/// Of messages between ranks; each direction has two. Unlikely to be ones that users choose.
constexpr int kForwardTag = 0x5b20;
constexpr int kBackwardTag = 0x5b22;

bool has_batch_norm(const torch::nn::Module& module) {
  bool has = false;
  for_each_named_module(module, [&](const std::string&, const torch::nn::Module& one) {
    has = has || one.as<SyncBatchNormImpl>() != nullptr;
    visit_batch_norm(one, [&](const auto&) { has = true; });
  });
  return has;
}

void check_options(const PipelineOptions& options) {
  if (options.micro_batches < 1) {
    throw base::UserError(fmt::format("PipelineParallel: micro_batches must be 1 or more, got {}",
                                      options.micro_batches));
  }
  if (options.statistics == PipelineStatistics::kBatch &&
      options.schedule == PipelineSchedule::k1f1b) {
    throw base::UserError(
        "PipelineParallel: statistics over the batch need all forwards before the first backward; "
        "use the "
        "schedule gpipe, or statistics over micro-batches");
  }
}

/// The stage's device, with its number.
/// @throws base::UserError when there is no module, or it is not on the device
at::Device device_of(const PipelineStage& stage, int index) {
  if (stage.is_empty()) {
    throw base::UserError(fmt::format("PipelineParallel: stage {} is null", index));
  }
  const at::Device device = checked_device("PipelineParallel", stage.device());
  const auto check = [&](const auto& list) {
    for (const auto& item : list) {
      const at::Tensor& tensor = item.value();
      if (!tensor.defined() || tensor.device() == device) continue;
      throw base::UserError(fmt::format(
          "PipelineParallel: stage {} ({}) is on {}, but its '{}' on {}; move the module with to()",
          index, stage.module().name(), device.str(), item.key(), tensor.device().str()));
    }
  };
  check(stage.module().named_parameters());
  check(stage.module().named_buffers());
  return device;
}

/// The parts of a tensor that each micro-batch gets.
Tensors divided(const char* what, const at::Tensor& tensor, const PipelineOptions& options) {
  if (!tensor.defined() || tensor.dim() == 0) {
    throw base::UserError(fmt::format("PipelineParallel: the {} {}; its first dimension is divided",
                                      what, tensor.defined() ? "is a scalar" : "is undefined"));
  }
  if (tensor.size(0) < options.micro_batches) {
    throw base::UserError(fmt::format(
        "PipelineParallel: the {} {} has {}, fewer than micro_batches ({})", what,
        c10::str(tensor.sizes()), base::counted(tensor.size(0), "sample"), options.micro_batches));
  }
  return tensor.tensor_split(options.micro_batches);
}

/// Runs a stage's part. If it fails, those that wait for it learn of it.
/// @return its failure; null: it has none of its own
template <class Body>
std::exception_ptr attempt(const StageTransfers& transfers, const Body& body) {
  std::exception_ptr failure;
  try {
    body();
    return failure;
  } catch (const StageAbandoned&) {
    // Another stage has failed.
  } catch (...) {
    failure = std::current_exception();
  }
  for (Transfer* const transfer : {transfers.outputs, transfers.input_gradients}) {
    if (transfer != nullptr) transfer->fail();
  }
  return failure;
}

}  // namespace

/// A pipeline, or this rank's part of one.
struct Pipeline {
  using Loss = PipelineParallel::Loss;

  PipelineOptions options;
  std::vector<PlacedStage> stages;          ///< those of this process
  std::unique_ptr<ComputeThreads> threads;  ///< null across ranks
  ProcessGroupPtr group;                    ///< null in one process
  bool has_failed = false;                  ///< across ranks

  struct Result {
    double loss = 0;
    Tensors outputs;
  };
  Result run(const at::Tensor& input, const at::Tensor& target, const Loss* loss);

 private:
  PipelineBatch divide(const at::Tensor& input, const at::Tensor& target, const Loss* loss) const;
  PipelineActions actions(const PlacedStage& placed, bool has_backward) const;
  Result run_in_threads(const PipelineBatch& batch);
  Result run_between_ranks(const at::Tensor& input, const at::Tensor& target, const Loss* loss);
  double agree(const std::exception_ptr& failure, double loss) const;
};

PipelineBatch Pipeline::divide(const at::Tensor& input, const at::Tensor& target,
                               const Loss* loss) const {
  PipelineBatch batch;
  batch.loss = loss;
  batch.average_losses = options.average_losses;
  if (stages.front().is_first()) batch.inputs = divided("input", input, options);
  if (loss != nullptr && stages.back().is_last()) {
    batch.targets = divided("target", target, options);
  }
  if (!batch.inputs.empty() && !batch.targets.empty() && input.size(0) != target.size(0)) {
    throw base::UserError(fmt::format(
        "PipelineParallel: the input {} and the target {} differ in the number of samples",
        c10::str(input.sizes()), c10::str(target.sizes())));
  }
  return batch;
}

PipelineActions Pipeline::actions(const PlacedStage& placed, bool has_backward) const {
  const int64_t count = options.micro_batches;
  const bool at_once =
      options.statistics == PipelineStatistics::kBatch && has_batch_norm(placed.stage.module());
  if (!has_backward) return forward_actions(count, at_once);
  if (options.schedule == PipelineSchedule::kGpipe) return gpipe_actions(count, at_once);
  return one_forward_one_backward_actions(count, placed.index,
                                          static_cast<int>(placed.names.size()));
}

Pipeline::Result Pipeline::run(const at::Tensor& input, const at::Tensor& target,
                               const Loss* loss) {
  if (TapeScope::is_open() || BatchStatisticsRecorder::current != nullptr) {
    throw base::UserError(
        "PipelineParallel: checkpoint() and update_bn_stats() around it would not know what its "
        "stages do; use them inside a stage, or without it");
  }
  const at::AutoGradMode grad_mode(loss != nullptr);
  return group ? run_between_ranks(input, target, loss)
               : run_in_threads(divide(input, target, loss));
}

Pipeline::Result Pipeline::run_in_threads(const PipelineBatch& batch) {
  const size_t count = stages.size();
  std::vector<QueueTransfer> forward(count - 1);
  std::vector<QueueTransfer> backward(count - 1);
  std::vector<StageTransfers> transfers(count);
  for (size_t i = 0; i + 1 < count; ++i) {
    transfers[i].outputs = transfers[i + 1].inputs = &forward[i];
    transfers[i].output_gradients = transfers[i + 1].input_gradients = &backward[i];
  }
  std::mutex mutex;
  std::exception_ptr failure;  // the first
  Result result;
  threads->run(static_cast<int>(count), [&](int index) {
    const auto i = static_cast<size_t>(index);
    const std::exception_ptr own = attempt(transfers[i], [&] {
      StageRun run(stages[i], batch, transfers[i]);
      run.run(actions(stages[i], batch.loss != nullptr));
      if (stages[i].is_last()) result = {.loss = run.loss(), .outputs = run.outputs()};
    });
    const std::lock_guard lock(mutex);
    if (!failure) failure = own;
  });
  if (failure) std::rethrow_exception(failure);
  return result;
}

Pipeline::Result Pipeline::run_between_ranks(const at::Tensor& input, const at::Tensor& target,
                                             const Loss* loss) {
  const PlacedStage& placed = stages.front();
  if (has_failed) {
    throw base::UserError(
        "PipelineParallel: a stage failed in an earlier step, whose messages may be under way; "
        "make the process group and the pipeline again");
  }
  std::optional<RankTransfer> inputs, outputs, input_gradients, output_gradients;
  StageTransfers transfers;
  const auto connect = [&](Transfer*& end, std::optional<RankTransfer>& transfer, int peer,
                           int tag) { end = &transfer.emplace(group, peer, tag, options.timeout); };
  if (!placed.is_first()) {
    connect(transfers.inputs, inputs, placed.index - 1, kForwardTag);
    connect(transfers.input_gradients, input_gradients, placed.index - 1, kBackwardTag);
  }
  if (!placed.is_last()) {
    connect(transfers.outputs, outputs, placed.index + 1, kForwardTag);
    connect(transfers.output_gradients, output_gradients, placed.index + 1, kBackwardTag);
  }
  has_failed = true;
  Result result;
  const std::exception_ptr failure = attempt(transfers, [&] {
    const PipelineBatch batch = divide(input, target, loss);
    StageRun run(placed, batch, transfers);
    run.run(actions(placed, loss != nullptr));
    result = {.loss = run.loss(), .outputs = run.outputs()};
  });
  result.loss = agree(failure, result.loss);
  for (Transfer* const transfer : {transfers.outputs, transfers.input_gradients}) {
    if (transfer != nullptr) transfer->release(0);
  }
  has_failed = false;
  return result;
}

/// Waits for all stages. @return the loss of the last.
/// @throws on every rank what a stage has thrown
double Pipeline::agree(const std::exception_ptr& failure, double loss) const {
  std::string text;
  int exit_code = 0;
  if (failure) {
    try {
      std::rethrow_exception(failure);
    } catch (const PeerError&) {
      throw;
    } catch (const std::exception& error) {
      text = plain_message(error);
      exit_code = base::exit_code_of(error);
    }
  }
  const double failed = failure ? 1 : 0;
  const at::Tensor own = at::tensor({failed, static_cast<double>(exit_code), loss}, at::kDouble);
  try {
    const Tensors all = all_gather(own, group, options.timeout);
    const auto first = std::find_if(
        all.begin(), all.end(), [](const at::Tensor& one) { return one[0].item<double>() != 0; });
    if (first == all.end()) return all.back()[2].item<double>();
    const std::vector<std::string> texts = all_gather_bytes(text, group, options.timeout);
    if (failure) std::rethrow_exception(failure);
    const auto stage = first - all.begin();
    throw StageError(static_cast<int>(stage), static_cast<int>((*first)[1].item<double>()),
                     texts[static_cast<size_t>(stage)]);
  } catch (const PeerError&) {
    if (failure) std::rethrow_exception(failure);  // which has the cause
    throw;
  }
}

}  // namespace detail

const at::Tensor& PipelineStage::only(const Tensors& inputs) {
  if (inputs.size() == 1) return inputs.front();
  throw base::UserError(fmt::format("its forward takes one tensor, not {}", inputs.size()));
}

PipelineParallel::PipelineParallel(std::vector<PipelineStage> stages,
                                   const PipelineOptions& options)
    : PipelineParallel(std::make_unique<detail::Pipeline>()) {
  detail::check_options(options);
  if (stages.empty()) throw base::UserError("PipelineParallel: there is no stage");
  if (options.process_group) {
    throw base::UserError(
        "PipelineParallel: process_group is for a stage on each rank; use "
        "PipelineParallel::across_ranks()");
  }
  pipeline_->options = options;
  std::vector<std::string> names;
  std::vector<at::Device> devices;
  for (const PipelineStage& stage : stages) {
    devices.push_back(detail::device_of(stage, static_cast<int>(names.size())));
    names.push_back(stage.module().name());
  }
  for (size_t i = 0; i < stages.size(); ++i) {
    pipeline_->stages.push_back({.stage = std::move(stages[i]),
                                 .device = devices[i],
                                 .index = static_cast<int>(i),
                                 .names = names});
  }
  pipeline_->threads = std::make_unique<detail::ComputeThreads>(devices);
}

PipelineParallel PipelineParallel::across_ranks(PipelineStage stage,
                                                const PipelineOptions& options) {
  detail::check_options(options);
  auto pipeline = std::make_unique<detail::Pipeline>();
  pipeline->options = options;
  pipeline->group = options.process_group.get();
  const int index = pipeline->group->getRank();
  const at::Device device = detail::device_of(stage, index);
  const auto describe = [&] {
    return fmt::format("micro_batches={}, schedule={}, statistics={}, average_losses={}, on {}",
                       options.micro_batches,
                       options.schedule == PipelineSchedule::kGpipe ? "gpipe" : "1f1b",
                       options.statistics == PipelineStatistics::kBatch ? "batch" : "micro-batch",
                       options.average_losses, c10::DeviceTypeName(device.type(), true));
  };
  const auto all = all_gather_bytes(describe(), pipeline->group, options.timeout);
  const auto differs = std::ranges::find_if(all, [&](const auto& one) { return one != all[0]; });
  if (differs != all.end()) {
    throw base::UserError(fmt::format(
        "PipelineParallel: the options differ between stages: stage 0 has {}, stage {} {}", all[0],
        differs - all.begin(), *differs));
  }
  auto names = all_gather_bytes(stage.module().name(), pipeline->group, options.timeout);
  pipeline->stages.push_back(
      {.stage = std::move(stage), .device = device, .index = index, .names = std::move(names)});
  return PipelineParallel(std::move(pipeline));
}

PipelineParallel::PipelineParallel(std::unique_ptr<detail::Pipeline> pipeline)
    : pipeline_(std::move(pipeline)) {}
PipelineParallel::~PipelineParallel() = default;
PipelineParallel::PipelineParallel(PipelineParallel&&) noexcept = default;
PipelineParallel& PipelineParallel::operator=(PipelineParallel&&) noexcept = default;

double PipelineParallel::step(const at::Tensor& input, const at::Tensor& target, const Loss& loss) {
  if (!loss) throw base::UserError("PipelineParallel: the loss is empty");
  return pipeline_->run(input, target, &loss).loss;
}

at::Tensor PipelineParallel::forward(const at::Tensor& input) {
  const auto outputs = pipeline_->run(input, {}, nullptr).outputs;
  return outputs.empty() ? at::Tensor() : at::cat(outputs);
}

}  // namespace syncbn::dist
