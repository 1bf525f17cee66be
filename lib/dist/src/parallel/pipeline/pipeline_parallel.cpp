#include <syncbn/dist/pipeline_parallel.h>

#include <fmt/format.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <syncbn/dist/collectives.h>
#include <syncbn/dist/plain_message.h>
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
#include "pipeline/stage_groups.h"
#include "pipeline/stage_run.h"
#include "pipeline/transfer.h"

namespace syncbn::dist {
namespace detail {
namespace {

using Tensors = std::vector<at::Tensor>;

/// Tags of messages between ranks, in each direction: the constant for headers, and the next number
/// for tensors. Users must not use these tags in the group during step() and forward().
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
        "use the schedule gpipe, or statistics over micro-batches");
  }
}

/// The stage's device, with its index.
/// @throws base::UserError if there is no module, or it is not on the device
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
          "PipelineParallel: stage {} ({}) is on {}, but its '{}' is on {}; move the module with "
          "to()",
          index, stage.module().name(), device.str(), item.key(), tensor.device().str()));
    }
  };
  check(stage.module().named_parameters());
  check(stage.module().named_buffers());
  return device;
}

/// Splits a tensor into micro-batches.
Tensors divided(const char* what, const at::Tensor& tensor, const PipelineOptions& options) {
  if (!tensor.defined() || tensor.dim() == 0) {
    throw base::UserError(
        fmt::format("PipelineParallel: the {} {}; its first dimension must be the samples", what,
                    tensor.defined() ? "is a scalar" : "is undefined"));
  }
  if (tensor.size(0) < options.micro_batches) {
    throw base::UserError(fmt::format(
        "PipelineParallel: the {} {} has {}, fewer than micro_batches ({})", what,
        c10::str(tensor.sizes()), base::counted(tensor.size(0), "sample"), options.micro_batches));
  }
  return tensor.detach().tensor_split(options.micro_batches);
}

/// Runs `body`, a stage's part of a step. If it throws, sends a failure notice to the neighbours.
/// @return the failure; null if there is none, or if another stage caused it
template <class Body>
std::exception_ptr attempt(const StageTransfers& transfers, const Body& body) {
  std::exception_ptr failure;
  try {
    body();
    return failure;
  } catch (const StageAbandoned&) {
    // The other stage reports its failure.
  } catch (...) {
    failure = std::current_exception();
  }
  for (Transfer* const transfer : {transfers.outputs, transfers.input_gradients}) {
    if (transfer == nullptr) continue;
    try {
      transfer->fail();
    } catch (const std::exception&) {
      // The group has failed, which its other ranks notice by themselves.
    }
  }
  return failure;
}

/// A stage's ends of its transfers to other ranks.
struct RankTransfers {
  std::optional<RankTransfer> inputs, outputs, input_gradients, output_gradients;

  StageTransfers pointers() {
    const auto pointer = [](std::optional<RankTransfer>& end) { return end ? &*end : nullptr; };
    return {.inputs = pointer(inputs),
            .outputs = pointer(outputs),
            .input_gradients = pointer(input_gradients),
            .output_gradients = pointer(output_gradients)};
  }
};

}  // namespace

/// A pipeline, or this rank's part of one.
struct Pipeline {
  using Loss = PipelineParallel::Loss;

  PipelineOptions options;
  std::vector<PlacedStage> stages;          ///< those of this process
  std::unique_ptr<ComputeThreads> threads;  ///< null across ranks
  ProcessGroupPtr group;                    ///< null in one process
  bool is_unusable = false;                 ///< across ranks, on GPUs: messages may be in flight

  struct Result {
    double loss = 0;
    Tensors outputs;
  };
  /// @param loss null: forward only
  Result run(const at::Tensor& input, const at::Tensor& target, const Loss* loss);

 private:
  PipelineBatch divide(const at::Tensor& input, const at::Tensor& target, const Loss* loss) const;
  PipelineActions actions(const PlacedStage& placed, bool has_backward) const;
  Result run_in_threads(const PipelineBatch& batch);
  Result run_between_ranks(const at::Tensor& input, const at::Tensor& target, const Loss* loss);
  double agree(RankTransfers& ends, bool is_done, const std::exception_ptr& failure, double loss);
};

PipelineBatch Pipeline::divide(const at::Tensor& input, const at::Tensor& target,
                               const Loss* loss) const {
  PipelineBatch batch;
  batch.is_training = loss != nullptr;
  batch.loss = loss;
  batch.average_losses = options.average_losses;
  if (stages.front().is_first()) batch.inputs = divided("input", input, options);
  if (loss != nullptr && stages.back().is_last()) {
    if (!*loss) throw base::UserError("PipelineParallel: the loss is empty");
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
  const bool whole_batch =
      options.statistics == PipelineStatistics::kBatch && has_batch_norm(placed.stage.module());
  if (!has_backward) return forward_actions(count, whole_batch);
  if (options.schedule == PipelineSchedule::kGpipe) return gpipe_actions(count, whole_batch);
  return one_forward_one_backward_actions(count, placed.index,
                                          static_cast<int>(placed.names.size()));
}

Pipeline::Result Pipeline::run(const at::Tensor& input, const at::Tensor& target,
                               const Loss* loss) {
  if (TapeScope::is_open() || BatchStatisticsRecorder::current != nullptr) {
    throw base::UserError(
        "PipelineParallel: it cannot run inside checkpoint() or update_bn_stats(); call "
        "checkpoint() inside a stage");
  }
  const at::AutoGradMode grad_mode(loss != nullptr);
  return group ? run_between_ranks(input, target, loss)
               : run_in_threads(divide(input, target, loss));
}

Pipeline::Result Pipeline::run_in_threads(const PipelineBatch& batch) {
  const auto claim = threads->claim();
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
      run.run(actions(stages[i], batch.is_training));
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
  if (is_unusable) {
    throw base::UserError(
        "PipelineParallel: a stage failed in an earlier step, and its messages may still be in "
        "flight; form a new process group and a new pipeline");
  }
  const PlacedStage& placed = stages.front();
  RankTransfers ends;
  if (!placed.is_first()) {
    ends.inputs.emplace(group, placed.index - 1, kForwardTag, options.timeout);
    ends.input_gradients.emplace(group, placed.index - 1, kBackwardTag, options.timeout);
  }
  if (!placed.is_last()) {
    ends.outputs.emplace(group, placed.index + 1, kForwardTag, options.timeout);
    ends.output_gradients.emplace(group, placed.index + 1, kBackwardTag, options.timeout);
  }
  const StageTransfers transfers = ends.pointers();
  Result result;
  bool is_done = false;
  const std::exception_ptr failure = attempt(transfers, [&] {
    const PipelineBatch batch = divide(input, target, loss);
    StageRun run(placed, batch, transfers);
    run.run(actions(placed, batch.is_training));
    result = {.loss = run.loss(), .outputs = run.outputs()};
    is_done = true;
  });
  try {
    result.loss = agree(ends, is_done, failure, result.loss);
  } catch (const PeerError&) {
    if (failure) std::rethrow_exception(failure);  // which has the cause
    throw;
  }
  return result;
}

/// Waits for all stages and for all messages.
/// @return the loss of the last stage
/// @throws on every rank, the failure of any stage
double Pipeline::agree(RankTransfers& ends, bool is_done, const std::exception_ptr& failure,
                       double loss) {
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
  enum Column { kNotDone, kFailed, kExitCode, kLoss, kSentForward, kSentBackward };
  const auto sent = [](const auto& end) { return end ? static_cast<double>(end->sent()) : 0.0; };
  const at::Tensor own =
      at::tensor({is_done ? 0.0 : 1.0, failure ? 1.0 : 0.0, static_cast<double>(exit_code), loss,
                  sent(ends.outputs), sent(ends.input_gradients)},
                 at::kDouble);
  const PlacedStage& placed = stages.front();
  // On GPUs, receives may be pending unless all stages are done.
  is_unusable = placed.device.is_cuda();
  const Tensors all = all_gather(own, group, options.timeout);
  const auto value = [&](int64_t stage, Column column) {
    return all[static_cast<size_t>(stage)][column].item<double>();
  };
  bool are_done = true;
  for (const at::Tensor& one : all) are_done = are_done && one[kNotDone].item<double>() == 0;
  is_unusable = is_unusable && !are_done;
  if (ends.inputs) {
    ends.inputs->discard(static_cast<int64_t>(value(placed.index - 1, kSentForward)),
                         placed.device);
  }
  if (ends.output_gradients) {
    ends.output_gradients->discard(static_cast<int64_t>(value(placed.index + 1, kSentBackward)),
                                   placed.device);
  }
  for (auto* const end : {&ends.outputs, &ends.input_gradients}) {
    if (*end) (*end)->release(0);
  }
  for (int64_t stage = 0; stage < std::ssize(all); ++stage) {
    if (value(stage, kFailed) == 0) continue;
    const std::vector<std::string> texts = all_gather_bytes(text, group, options.timeout);
    if (failure) std::rethrow_exception(failure);
    throw StageError(static_cast<int>(stage), static_cast<int>(value(stage, kExitCode)),
                     texts[static_cast<size_t>(stage)]);
  }
  if (!are_done) {
    throw base::InternalError(
        "PipelineParallel: stages were abandoned, but none reported a failure");
  }
  return value(std::ssize(all) - 1, kLoss);
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
  if (stages.empty()) throw base::UserError("PipelineParallel: no stages are given");
  if (options.process_group || options.timeout) {
    throw base::UserError(
        "PipelineParallel: process_group and timeout are for a stage on each rank; use "
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
  detail::check_stages_share_no_group(pipeline_->stages);
  pipeline_->threads = std::make_unique<detail::ComputeThreads>("PipelineParallel", devices);
}

PipelineParallel PipelineParallel::across_ranks(PipelineStage stage,
                                                const PipelineOptions& options) {
  auto pipeline = std::make_unique<detail::Pipeline>();
  pipeline->options = options;
  pipeline->group = options.process_group.get();
  const int index = pipeline->group->getRank();
  // If one rank throws, all must: the others would wait for it.
  at::Device device = at::kCPU;
  std::exception_ptr mistake;
  std::string own;
  try {
    detail::check_options(options);
    device = detail::device_of(stage, index);
    detail::check_groups_have_one_stage(stage, pipeline->group);
    own = fmt::format("micro_batches={}, schedule={}, statistics={}, average_losses={}, on {}",
                      options.micro_batches,
                      options.schedule == PipelineSchedule::kGpipe ? "gpipe" : "1f1b",
                      options.statistics == PipelineStatistics::kBatch ? "batch" : "micro-batch",
                      options.average_losses, c10::DeviceTypeName(device.type(), true));
  } catch (const base::Error& error) {
    mistake = std::current_exception();
    own = error.what();
  }
  const auto mistakes = all_gather_bytes(mistake ? own : "", pipeline->group, options.timeout);
  if (mistake) std::rethrow_exception(mistake);
  for (const std::string& text : mistakes) {
    if (!text.empty()) throw base::UserError(text);
  }
  const auto all = all_gather_bytes(own, pipeline->group, options.timeout);
  const auto differs = std::ranges::find_if(all, [&](const auto& one) { return one != all[0]; });
  if (differs != all.end()) {
    throw base::UserError(fmt::format(
        "PipelineParallel: the options differ between stages: stage 0 has {}, stage {} {}", all[0],
        differs - all.begin(), *differs));
  }
  auto names = all_gather_bytes(stage.module().name(), pipeline->group, options.timeout);
  pipeline->stages.push_back(
      {.stage = std::move(stage),
       .device = device,
       .index = index,
       .names = std::move(names),
       .place = fmt::format(" on rank {} ({})", detail::world_rank(pipeline->group, index),
                            base::hostname())});
  return PipelineParallel(std::move(pipeline));
}

PipelineParallel::PipelineParallel(std::unique_ptr<detail::Pipeline> pipeline)
    : pipeline_(std::move(pipeline)) {}
PipelineParallel::~PipelineParallel() = default;
PipelineParallel::PipelineParallel(PipelineParallel&&) noexcept = default;
PipelineParallel& PipelineParallel::operator=(PipelineParallel&&) noexcept = default;

detail::Pipeline& PipelineParallel::pipeline() const {
  if (pipeline_) return *pipeline_;
  throw base::UserError("PipelineParallel: this object was moved from; use the other one");
}

double PipelineParallel::step(const at::Tensor& input, const at::Tensor& target, const Loss& loss) {
  return pipeline().run(input, target, &loss).loss;
}

at::Tensor PipelineParallel::forward(const at::Tensor& input) {
  const auto outputs = pipeline().run(input, {}, nullptr).outputs;
  return outputs.empty() ? at::Tensor() : at::cat(outputs);
}

}  // namespace syncbn::dist
