#include "step/training_step.h"

#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/record_function.h>
#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/log.h>
#include <syncbn/base/text.h>
#include <syncbn/dist/comm_hooks.h>
#include <syncbn/dist/process_group.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "common/component_error.h"
#include "common/rank_0.h"
#include "profile/phases.h"

namespace syncbn::train {
namespace {

dist::DdpOptions ddp_options(const DdpConfig& config, std::vector<std::string> ignored) {
  return {.broadcast_buffers = config.broadcast_buffers,
          .find_unused_parameters = config.find_unused_parameters,
          .gradient_as_bucket_view = config.gradient_as_bucket_view,
          .static_graph = config.static_graph,
          .bucket_cap_mb = config.bucket_cap_mb,
          .parameters_to_ignore = std::move(ignored)};
}

dist::CommHook comm_hook(const std::string& name) {
  if (name == "fp16") return dist::fp16_compress_hook();
  if (name == "bf16") return dist::bf16_compress_hook();
  return dist::power_sgd_hook();
}

/// The names of the trainable parameters that do not begin with `prefix`.
std::vector<std::string> others_than(const std::string& prefix, const models::Model& model) {
  std::vector<std::string> names;
  for (const auto& [name, parameter] : trainable_parameters(model)) {
    if (!name.starts_with(prefix)) names.push_back(name);
  }
  return names;
}

/// Sets `found_inf` to 1 if a gradient is not finite.
void check(const Tensors& gradients, at::Tensor& found_inf) {
  Tensors dense;
  for (const at::Tensor& gradient : gradients) {
    dense.push_back(gradient.is_sparse() ? gradient._values() : gradient);
  }
  if (dense.empty()) return;
  const at::NoGradGuard no_grad;
  const at::Tensor norms = at::stack(at::_foreach_norm(dense, 1));
  found_inf.logical_or_(norms.isfinite().all().logical_not());
}

/// Turns off the gradients of parameters while it lives.
class Untrained {
 public:
  explicit Untrained(const Tensors& parameters) : parameters_(parameters) { set(false); }
  ~Untrained() { set(true); }
  Untrained(const Untrained&) = delete;
  Untrained& operator=(const Untrained&) = delete;

 private:
  void set(bool trains) {
    for (const at::Tensor& parameter : parameters_) parameter.set_requires_grad(trains);
  }

  const Tensors& parameters_;
};

/// Splits a batch into `parts`, of which the last ones may be empty.
std::vector<data::Batch> split(const data::Batch& batch, int64_t parts) {
  if (parts == 1) return {batch};
  std::vector<data::Batch> all;
  const std::vector<at::Tensor> inputs = batch.data.tensor_split(parts);
  const std::vector<at::Tensor> targets = batch.target.tensor_split(parts);
  auto random = batch.randoms.begin();
  for (size_t i = 0; i < inputs.size(); ++i) {
    const auto end = random + std::min(inputs[i].size(0), batch.randoms.end() - random);
    all.push_back({.data = inputs[i], .target = targets[i], .randoms = {random, end}});
    random = end;
  }
  return all;
}

/// 0, with a graph to every output: backward then reaches all parameters.
at::Tensor zero_loss(const Task::Outputs& outputs) {
  at::Tensor zero = outputs.front().sum() * 0;
  for (size_t i = 1; i < outputs.size(); ++i) zero = zero + outputs[i].sum() * 0;
  return zero;
}

/// @throws base::UserError if all parameters of a turn are frozen
void check_trains(const std::string& prefix, const models::Model& model) {
  const bool trains = std::ranges::any_of(
      trainable_parameters(model), [&](const auto& one) { return one.first.starts_with(prefix); });
  if (trains) return;
  throw base::UserError(
      fmt::format("freeze: all parameters of the {} are frozen, and a step trains it in a turn of "
                  "its own; leave some out",
                  prefix));
}

}  // namespace

at::ScalarType chosen_precision(const Config& config, at::Device device) {
  if (config.amp == "bf16") return at::kBFloat16;
  if (config.amp == "fp16") return at::kHalf;
  const bool takes_bf16 = config.amp == "auto" && device.is_cuda() &&
                          at::detail::getCUDAHooks().supportsBFloat16ConvolutionWithCuDNNv8();
  return takes_bf16 ? at::kBFloat16 : at::kFloat;
}

Autocast::Autocast(const Config& config, at::Device device)
    : device_(device.type()),
      was_enabled_(at::autocast::is_autocast_enabled(device_)),
      former_type_(at::autocast::get_autocast_dtype(device_)) {
  const at::ScalarType precision = chosen_precision(config, device);
  if (precision == at::kFloat) return;
  at::autocast::set_autocast_enabled(device_, true);
  at::autocast::set_autocast_dtype(device_, precision);
  at::autocast::increment_nesting();
}

Autocast::~Autocast() {
  if (at::autocast::is_autocast_enabled(device_) == was_enabled_) return;
  // The cache keeps casts of parameters until the outermost region ends.
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device_, was_enabled_);
  at::autocast::set_autocast_dtype(device_, former_type_);
}

Task::Outputs full_precision(Task::Outputs outputs) {
  for (at::Tensor& output : outputs) {
    if (at::isReducedFloatingType(output.scalar_type())) output = output.to(at::kFloat);
  }
  return outputs;
}

bool is_of_one_value(const std::exception& error) {
  return std::string_view(error.what()).find("value per channel") != std::string_view::npos;
}

bool became_too_small(const Config& config, const std::exception& error) {
  // Layers that are not converted refuse it on one rank only, while others wait in an exchange.
  const bool is_on_all_ranks =
      std::string_view(error.what()).find("one value per channel over") != std::string_view::npos;
  return config.loader.on_error == "skip" && is_of_one_value(error) &&
         (!config.sync_batchnorm || is_on_all_ranks);
}

TrainingStep::TrainingStep(const Config& config, const Task& task, const BatchToDevice& to_device,
                           std::shared_ptr<models::Model> model, std::shared_ptr<Replicas> replicas)
    : config_(config),
      task_(task),
      to_device_(to_device),
      model_(std::move(model)),
      replicas_(std::move(replicas)),
      device_(dist::device()),
      optimizer_(report_on_rank_0([&] {
        return refusing([&] { return component_name("optimizer", config.optimizer); },
                        [&] { return config.optimizer.make(trainable_parameters(*model_)); });
      })),
      scaler_(chosen_precision(config, device_) == at::kHalf
                  ? std::make_unique<GradScaler>(config.scaler, device_)
                  : nullptr),
      ema_(config.ema.decay > 0 ? std::make_unique<Ema>(config.ema, *model_) : nullptr),
      vote_(milliseconds(config.timeout)) {
  for (const std::string& prefix : task.turns()) {
    report_on_rank_0([&] { check_trains(prefix, *model_); });
    turns_.push_back(std::make_unique<Turn>(config, model_, prefix));
  }
  counts_ = at::zeros({task_.num_counts()}, at::TensorOptions(at::kLong).device(device_));
}

TrainingStep::Turn::Turn(const Config& config, const std::shared_ptr<models::Model>& model,
                         const std::string& prefix)
    : ddp(model, ddp_options(config.ddp, others_than(prefix, *model))) {
  for (const auto& [name, parameter] : trainable_parameters(*model)) {
    (name.starts_with(prefix) ? parameters : others).push_back(parameter);
  }
  if (config.ddp.comm_hook != "none") {
    ddp.register_comm_hook(comm_hook(config.ddp.comm_hook), config.ddp.comm_hook);
  }
}

std::optional<StepVote::Result> TrainingStep::run(const data::Batch& batch, double lr,
                                                  data::SampleRandom& random,
                                                  const Wishes& wishes) {
  const data::Batch on_device = [&] {
    RECORD_USER_SCOPE(kToDevicePhase);
    const data::Batch moved = blaming([&] { return component_name("data", config_.data); },
                                      [&] { return to_device_(batch); });
    if (batch.size() == 0) return moved;
    return blaming([&] { return task_name(config_, {}, moved.target); },
                   [&] { return task_.augment(moved, random); });
  }();
  save_former();
  trained_ = 0;
  for (const auto& turn : turns_) turn->ddp.zero_grad();
  std::optional<StepVote::Result> former;
  at::Tensor loss;
  at::Tensor found_inf = at::zeros({}, at::TensorOptions(at::kFloat).device(device_));
  for (size_t i = 0; i < turns_.size(); ++i) {
    Turn& turn = *turns_[i];
    const at::Tensor turn_loss = backward(i, on_device);
    loss = loss.defined() ? loss + turn_loss : turn_loss;
    if (i == 0) {
      former = vote_.take();
      if (former && !accepts(*former)) return former;
    }
    prepare_gradients(turn, found_inf);
    const bool is_last = i + 1 == turns_.size();
    at::Tensor is_bad_loss;
    if (is_last) {
      RECORD_USER_SCOPE(kVotePhase);
      // A mean over the whole batch; the vote needs that of the samples that were trained on.
      if (trained_ > 0 && trained_ < on_device.size()) {
        loss = loss * (static_cast<double>(on_device.size()) / static_cast<double>(trained_));
      }
      is_bad_loss = vote_.cast(wishes, loss, trained_, found_inf);
    }
    RECORD_USER_SCOPE(kOptimizerPhase);
    timer_.start();
    // The optimizer skips parameters without a gradient: those of other turns.
    blaming([&] { return component_name("optimizer", config_.optimizer); },
            [&] { optimizer_->step(lr, found_inf); });
    timer_.add_lap(times_.optimizer);
    if (is_last) restore_former(scaler_ ? is_bad_loss : found_inf);
    if (!is_last) turn.ddp.zero_grad();
  }
  if (scaler_) scaler_->update(found_inf);
  return former;
}

void TrainingStep::prepare_gradients(const Turn& turn, at::Tensor& found_inf) const {
  const Tensors gradients = gradients_of(turn.parameters);
  if (scaler_) {
    scaler_->unscale(gradients, found_inf);
  } else {
    check(gradients, found_inf);
  }
  if (gradients.empty()) return;
  if (config_.clip.norm) clip_norm(gradients, *config_.clip.norm);
  if (config_.clip.value) clip_value(gradients, *config_.clip.value);
  if (config_.clip.adaptive) clip_adaptive(turn.parameters, *config_.clip.adaptive);
}

at::Tensor TrainingStep::backward(size_t turn, const data::Batch& batch) {
  const Untrained untrained(turns_[turn]->others);
  const std::vector<data::Batch> parts = split(batch, config_.accumulate);
  if (parts.size() == 1) return backward_part(turn, batch, 1);
  const auto samples = static_cast<double>(batch.size());
  at::Tensor loss;
  // With fewer samples than parts, the last parts are empty (all of them where every sample was
  // damaged). They run first, since the exchange of gradients is part of the last backward.
  for (size_t i = parts.size(); i-- > 0;) {
    const int64_t size = parts[i].size();
    // With an empty part, the rank still takes part in the exchange of statistics.
    if (size == 0 && i > 0 && !config_.sync_batchnorm) continue;
    const double share = size > 0 ? static_cast<double>(size) / samples : 0;
    const auto add = [&] {
      const at::Tensor part_loss = backward_part(turn, parts[i], share) * share;
      loss = loss.defined() ? loss + part_loss : part_loss;
    };
    if (i > 0) {
      const auto no_sync = turns_[turn]->ddp.no_sync();
      add();
    } else {
      add();
    }
  }
  return loss;
}

at::Tensor TrainingStep::backward_part(size_t turn, data::Batch batch, double share) {
  at::Tensor loss;
  timer_.start();
  {
    RECORD_USER_SCOPE(kForwardPhase);
    const Autocast autocast(config_, device_);
    const Task::Outputs outputs = full_precision(turns_[turn]->ddp.invoke(
        [&](models::Model& model) { return forward_or_empty(model, turn, batch); }));
    if (turn == 0) trained_ += batch.size();
    const auto task = [&] { return task_name(config_, outputs, batch.target); };
    loss = blaming(task, [&] {
      at::Tensor made = batch.size() > 0 ? task_.loss(outputs, batch.target) : zero_loss(outputs);
      check_defined({made});
      return made;
    });
    if (batch.size() > 0 && turn == 0 && task_.counts_training()) {
      const at::NoGradGuard no_grad;
      blaming(task, [&] { counts_.add_(task_.counts(outputs, batch.target)); });
    }
  }
  timer_.add_lap(times_.forward);
  const at::Tensor weighted = share == 1 ? loss : loss * share;
  RECORD_USER_SCOPE(kBackwardPhase);
  blaming([&] { return "backward pass of " + model_name(config_, batch.data); },
          [&] {
            if (!loss.requires_grad()) {
              throw std::runtime_error(
                  "the loss does not depend on a parameter that is trained; are the outputs "
                  "detached, or made under NoGradGuard?");
            }
            (scaler_ ? scaler_->scale(weighted) : weighted).backward();
          });
  timer_.add_lap(times_.backward);
  return loss.detach();
}

// In one call of DDP's: another would broadcast the buffers again, which other ranks may not do.
Task::Outputs TrainingStep::forward_or_empty(models::Model& model, size_t turn,
                                             data::Batch& batch) {
  try {
    return forward(model, turn, batch);
  } catch (const std::exception& error) {
    if (!became_too_small(config_, error)) throw;
    if (batch.size() > 0 && !std::exchange(has_warned_, true)) {
      spdlog::warn(
          "left out of a step: {} of a batch whose other samples could not be read, too few for "
          "batch norm; mend or remove the files that the warnings name, or raise batch_size",
          base::counted(batch.size(), "sample"));
    }
  }
  batch = {.data = batch.data.narrow(0, 0, 0), .target = batch.target.narrow(0, 0, 0)};
  return forward(model, turn, batch);
}

Task::Outputs TrainingStep::forward(models::Model& model, size_t turn,
                                    const data::Batch& batch) const {
  const auto forward_one = [&](models::Model& one, const data::Batch& part) {
    return blaming([&] { return model_name(config_, part.data); },
                   [&] {
                     auto outputs = task_.forward(one, turn, part);
                     check_defined(outputs);
                     return outputs;
                   });
  };
  if (!replicas_) return forward_one(model, batch);
  return replicas_->invoke(
      [&](models::Model& replica, const at::Tensor& data) {
        // All but `data` of the replica's part of the batch, by the positions of its samples.
        const auto [place, places] = dist::replica_place();
        const at::Tensor own =
            at::arange(batch.size()).tensor_split(places)[static_cast<size_t>(place)];
        const int64_t size = own.numel();
        const int64_t first = size > 0 ? own[0].item<int64_t>() : 0;
        data::Batch part{.data = data, .target = batch.target.narrow(0, first, size)};
        if (batch.sizes.defined()) part.sizes = batch.sizes.narrow(0, first, size);
        const auto slice = [&](const auto& all) {
          using List = std::decay_t<decltype(all)>;
          return all.empty() ? List() : List(all.begin() + first, all.begin() + first + size);
        };
        part.indices = slice(batch.indices);
        part.randoms = slice(batch.randoms);
        return forward_one(replica, part);
      },
      batch.data);
}

/// What a step changes besides parameters and has to be undone if the step is skipped.
Tensors TrainingStep::undone_by_skip() const {
  if (config_.on_nan != "skip") return {};
  Tensors all = model_->buffers();
  all.push_back(counts_);
  return all;
}

void TrainingStep::save_former() {
  former_.clear();
  for (const at::Tensor& tensor : undone_by_skip()) former_.push_back(tensor.detach().clone());
}

void TrainingStep::restore_former(const at::Tensor& is_bad) {
  const at::NoGradGuard no_grad;
  const Tensors all = undone_by_skip();
  for (size_t i = 0; i < all.size(); ++i) {
    all[i].copy_(at::where(is_bad != 0, former_[i], all[i]));
  }
}

void TrainingStep::update_average(int64_t step, bool copies) {
  if (ema_) ema_->update(step, copies);
}

StepTime TrainingStep::take_times(int64_t steps) {
  StepTime sampled;  // means over the steps that the Reducer measures
  const auto seconds = [](std::chrono::nanoseconds duration) {
    return std::chrono::duration<double>(duration).count();
  };
  for (const auto& turn : turns_) {
    const dist::DdpStats stats = turn->ddp.stats();
    sampled.forward += seconds(stats.forward_compute_time);
    sampled.backward += seconds(stats.backward_compute_time);
    sampled.exchange +=
        seconds(stats.backward_comm_time - stats.backward_compute_comm_overlap_time);
  }
  const StepTime sums = std::exchange(times_, {});
  if (device_.is_cuda()) return sampled;
  const double both = sums.backward / static_cast<double>(steps);
  const double sampled_both = sampled.backward + sampled.exchange;
  const double exchange = sampled_both > 0 ? both * sampled.exchange / sampled_both : 0;
  return {.forward = sums.forward / static_cast<double>(steps),
          .backward = both - exchange,
          .exchange = exchange,
          .optimizer = sums.optimizer / static_cast<double>(steps)};
}

at::Tensor TrainingStep::take_counts() {
  const at::NoGradGuard no_grad;
  const at::Tensor taken = counts_.clone();
  counts_.zero_();
  return taken;
}

}  // namespace syncbn::train
