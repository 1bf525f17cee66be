#include "training_step.h"

#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <syncbn/dist/comm_hooks.h>
#include <syncbn/dist/process_group.h>

#include <utility>

#include "rank_0.h"

namespace syncbn::train {
namespace {

at::ScalarType precision(const std::string& amp) {
  if (amp == "bf16") return at::kBFloat16;
  return amp == "fp16" ? at::kHalf : at::kFloat;
}

dist::DdpOptions ddp_options(const DdpConfig& config) {
  return {.broadcast_buffers = config.broadcast_buffers,
          .find_unused_parameters = config.find_unused_parameters,
          .gradient_as_bucket_view = config.gradient_as_bucket_view,
          .static_graph = config.static_graph,
          .bucket_cap_mb = config.bucket_cap_mb};
}

dist::CommHook comm_hook(const std::string& name) {
  if (name == "fp16") return dist::fp16_compress_hook();
  if (name == "bf16") return dist::bf16_compress_hook();
  return dist::power_sgd_hook();
}

std::unique_ptr<GradScaler> make_scaler(const Config& config, at::Device device) {
  if (config.amp != "fp16") return nullptr;
  return std::make_unique<GradScaler>(
      GradScaler::Options{.init_scale = config.scaler.init_scale,
                          .growth_factor = config.scaler.growth_factor,
                          .backoff_factor = config.scaler.backoff_factor,
                          .growth_interval = config.scaler.growth_interval},
      device);
}

/// 0, with a graph to every output: backward then reaches all parameters.
at::Tensor zero_loss(const Task::Outputs& outputs) {
  at::Tensor zero = outputs.front().sum() * 0;
  for (size_t i = 1; i < outputs.size(); ++i) zero = zero + outputs[i].sum() * 0;
  return zero;
}

}  // namespace

Autocast::Autocast(const Config& config, at::Device device)
    : device_(device.type()),
      was_enabled_(at::autocast::is_autocast_enabled(device_)),
      former_type_(at::autocast::get_autocast_dtype(device_)) {
  if (config.amp == "none") return;
  at::autocast::set_autocast_enabled(device_, true);
  at::autocast::set_autocast_dtype(device_, precision(config.amp));
  at::autocast::increment_nesting();
}

Autocast::~Autocast() {
  if (at::autocast::is_autocast_enabled(device_) == was_enabled_) return;
  // Casts of parameters are kept until the outermost region ends.
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

TrainingStep::TrainingStep(const Config& config, const Task& task, const BatchToDevice& to_device,
                           std::shared_ptr<models::Model> model)
    : config_(config),
      task_(task),
      to_device_(to_device),
      model_(std::move(model)),
      device_(dist::device()),
      optimizer_(
          report_on_rank_0([&] { return config.optimizer.make(trainable_parameters(*model_)); })),
      ddp_(model_, ddp_options(config.ddp)),
      scaler_(make_scaler(config, device_)),
      ema_(config.ema.decay > 0 ? std::make_unique<Ema>(config.ema, *model_) : nullptr),
      vote_(device_) {
  if (config.ddp.comm_hook != "none") {
    ddp_.register_comm_hook(comm_hook(config.ddp.comm_hook), config.ddp.comm_hook);
  }
  for (const auto& [name, parameter] : trainable_parameters(*model_)) {
    parameters_.push_back(parameter);
  }
  take_counts();
}

std::optional<StepVote::Result> TrainingStep::run(const data::Batch& batch, double lr,
                                                  data::SampleRandom& random,
                                                  const Wishes& wishes) {
  save_former();
  ddp_.zero_grad();
  data::Batch on_device{to_device_.input(batch), to_device_.target(batch)};
  if (batch.size() > 0) on_device = task_.augment(on_device, random);
  const at::Tensor loss = backward(on_device);

  auto former = vote_.take();
  if (former && !accepts(*former)) return former;

  at::Tensor found_inf = at::zeros({}, loss.options().dtype(at::kFloat).requires_grad(false));
  const Tensors gradients = gradients_of(parameters_);
  if (scaler_) {
    scaler_->unscale(gradients, found_inf);
  } else {
    check(gradients, found_inf);
  }
  clip(gradients);
  const at::Tensor is_bad_loss = vote_.cast(wishes, loss, batch.size(), found_inf);
  optimizer_->step(lr, found_inf);
  restore_former(scaler_ ? is_bad_loss : found_inf);
  if (scaler_) scaler_->update(found_inf);
  return former;
}

at::Tensor TrainingStep::backward(const data::Batch& batch) {
  const int64_t parts = config_.accumulate;
  if (parts == 1) return backward_part(batch.data, batch.target, 1);
  const std::vector<at::Tensor> inputs = batch.data.tensor_split(parts);
  const std::vector<at::Tensor> targets = batch.target.tensor_split(parts);
  const auto samples = static_cast<double>(batch.size());
  at::Tensor loss;
  // With fewer samples than parts, the last parts are empty (all of them where every sample was
  // damaged). They run first, since the exchange of gradients is part of the last backward.
  for (int64_t part = parts - 1; part >= 0; --part) {
    const auto i = static_cast<size_t>(part);
    const int64_t size = targets[i].size(0);
    // An empty part still takes part in the other ranks' statistics.
    if (size == 0 && part > 0 && !config_.sync_batchnorm) continue;
    const double share = size > 0 ? static_cast<double>(size) / samples : 0;
    const auto add = [&] {
      const at::Tensor part_loss = backward_part(inputs[i], targets[i], share) * share;
      loss = loss.defined() ? loss + part_loss : part_loss;
    };
    if (part > 0) {
      const auto no_sync = ddp_.no_sync();
      add();
    } else {
      add();
    }
  }
  return loss;
}

at::Tensor TrainingStep::backward_part(const at::Tensor& input, const at::Tensor& target,
                                       double share) {
  at::Tensor loss;
  {
    const Autocast autocast(config_, device_);
    const Task::Outputs outputs = full_precision(ddp_.invoke(&models::Model::forward_all, input));
    loss = target.size(0) > 0 ? task_.loss(outputs, target) : zero_loss(outputs);
    if (target.size(0) > 0 && !task_.needs_records()) {
      const at::NoGradGuard no_grad;
      counts_.add_(task_.counts(outputs, target));
    }
  }
  const at::Tensor weighted = share == 1 ? loss : loss * share;
  (scaler_ ? scaler_->scale(weighted) : weighted).backward();
  return loss.detach();
}

void TrainingStep::check(const Tensors& gradients, at::Tensor& found_inf) const {
  Tensors dense;
  for (const at::Tensor& gradient : gradients) {
    dense.push_back(gradient.is_sparse() ? gradient._values() : gradient);
  }
  if (dense.empty()) return;
  const at::NoGradGuard no_grad;
  const at::Tensor norms = at::stack(at::_foreach_norm(dense, 1));
  found_inf.logical_or_(norms.isfinite().all().logical_not());
}

void TrainingStep::clip(const Tensors& gradients) {
  if (gradients.empty()) return;
  if (config_.clip.norm) clip_norm(gradients, *config_.clip.norm);
  if (config_.clip.value) clip_value(gradients, *config_.clip.value);
  if (config_.clip.adaptive) clip_adaptive(parameters_, *config_.clip.adaptive);
}

/// What a step changes besides parameters, if it may turn out that it must not.
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

at::Tensor TrainingStep::take_counts() {
  return std::exchange(
      counts_, at::zeros({task_.num_counts()}, at::TensorOptions(at::kLong).device(device_)));
}

}  // namespace syncbn::train
