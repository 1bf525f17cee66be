// Exports checkpoints for the scripts' --resume.
#include <ATen/core/jit_type.h>
#include <ATen/ops/scalar_tensor.h>
#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/config/yaml.h>
#include <syncbn/models/weights.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "checkpoints/python_run.h"
#include "step/model.h"

namespace syncbn::train {
namespace {

using models::Dict;
using models::make_dict;
using models::on_host;
using models::put;

c10::impl::GenericList make_list() {
  return c10::impl::GenericList(c10::AnyType::get());
}

/// An option of the configuration in Python's form.
c10::IValue option(const config::Value& section, const std::string& key) {
  const config::Value& value = *section.find(key);
  const auto number = [](const config::Value& item) {
    config::Faults faults;
    double read = 0;
    config::Codec<double>::read(item, read, "", faults);
    return read;
  };
  if (value.kind == config::Value::Kind::kList) {  // betas
    std::vector<c10::IValue> items;
    for (const config::Value& item : value.list) items.emplace_back(number(item));
    return c10::ivalue::Tuple::create(std::move(items));
  }
  if (value.scalar == "true" || value.scalar == "false") return value.scalar == "true";
  return number(value);
}

class PythonExport {
 public:
  PythonExport(const Checkpoint& checkpoint, PythonScript script, const Config& config,
               models::Model& model)
      : checkpoint_(checkpoint),
        is_imagenet_(script == PythonScript::kImagenet),
        config_(config),
        optimizer_section_(config.optimizer.write()),
        schedule_section_(config.schedule.write()),
        model_(model),
        optimizer_(config.optimizer.make(trainable_parameters(model))),
        groups_(optimizer_->groups()),
        epoch_(checkpoint.sampler.epoch) {}

  Dict make() const {
    check();
    Dict run = make_dict();
    put(run, is_imagenet_ ? "state_dict" : "model", weights());
    put(run, "optimizer", optimizer());
    put(run, is_imagenet_ ? "scheduler" : "lr_scheduler", scheduler());
    put(run, "epoch", is_imagenet_ ? epoch_ : epoch_ - 1);
    if (is_imagenet_) {
      put(run, "arch", config_.model.type());
      put(run, "best_acc1", best_accuracy());
      return run;
    }
    if (!checkpoint_.ema.empty()) put(run, "model_ema", average());
    if (!checkpoint_.scaler.empty()) put(run, "scaler", scaler());
    return run;
  }

 private:
  std::string script() const {
    return is_imagenet_ ? "imagenet/main.py" : "torchvision's train.py";
  }

  void check() const {
    if (!checkpoint_.has_optimizer) {
      throw base::UserError("it holds a network without the state of the run; name last.pt");
    }
    if (checkpoint_.sampler.consumed != 0 || epoch_ == 0) {
      throw base::UserError(
          fmt::format("it is of step {}, within epoch {}, and {} resumes only at the ends of "
                      "epochs; train to the end of the epoch first",
                      checkpoint_.step, epoch_ + 1, script()));
    }
    if (!config_.freeze.empty()) {
      throw base::UserError(
          fmt::format("freeze: {} trains all parameters; resume the run without it", script()));
    }
    const std::string& optimizer = config_.optimizer.type();
    if (is_imagenet_ ? optimizer != "sgd" : python_options(optimizer).empty()) {
      throw base::UserError(fmt::format("{} has no optimizer {}", script(), optimizer));
    }
    if (is_imagenet_ && groups_.size() > 1) {
      throw base::UserError(
          fmt::format("{} has one group of parameters and this run {}, by optimizer.no_decay, "
                      "groups or layer_decay",
                      script(), groups_.size()));
    }
    check_schedule();
  }

  void check_schedule() const {
    const std::string& type = config_.schedule.type();
    const bool is_known =
        type == "step" ||
        (!is_imagenet_ && (type == "multistep" || type == "exponential" || type == "cosine"));
    if (!is_known || (is_imagenet_ && warmup() > 0)) {
      throw base::UserError(fmt::format("{} has no schedule {}{}", script(), type,
                                        is_known ? " with a warm-up" : ""));
    }
    const bool depends_on_steps = warmup() > 0 || type == "exponential" || type == "cosine";
    if (depends_on_steps && schedule_section_.find("by_epoch")->scalar != "true") {
      throw base::UserError(
          fmt::format("schedule.by_epoch: {} changes the rate once an epoch; a run that is to go "
                      "on there needs by_epoch: true",
                      script()));
    }
    const bool is_linear =
        schedule_section_.find("warmup_start")->kind != config::Value::Kind::kNull;
    if (warmup() > 0 && (!is_linear || std::floor(warmup()) != warmup())) {
      throw base::UserError(
          "schedule.warmup: Python's LinearLR needs whole epochs and a warmup_start");
    }
  }

  double warmup() const {
    config::EpochsOrSteps length;
    config::Faults faults;
    config::Codec<config::EpochsOrSteps>::read(*schedule_section_.find("warmup"), length, "",
                                               faults);
    return length.epochs(steps_per_epoch());
  }

  int64_t steps_per_epoch() const {
    return std::max<int64_t>(checkpoint_.step / std::max<int64_t>(epoch_, 1), 1);
  }

  // ---- the network ------------------------------------------------------------------------------

  Dict weights() const {
    load_model(checkpoint_.model, model_);
    Dict dict = make_dict();
    for (const auto& item : models::state_dict(model_)) {
      // main.py saves the state of a DataParallel or DistributedDataParallel.
      put(dict, (is_imagenet_ ? "module." : "") + item.key(), on_host(item.value()));
    }
    return dict;
  }

  Dict average() const {
    const bool only_copied =
        static_cast<double>(epoch_) <= config_.ema.start.epochs(steps_per_epoch());
    const int64_t updates = only_copied ? 0 : checkpoint_.step / config_.ema.every;
    Dict dict = make_dict();
    put(dict, "n_averaged", at::scalar_tensor(updates, at::kLong));
    for (const auto& [name, tensor] : checkpoint_.ema) put(dict, "module." + name, on_host(tensor));
    return dict;
  }

  at::Tensor best_accuracy() const {
    const bool is_known = checkpoint_.best_metric == "accuracy" && !checkpoint_.best.empty();
    return at::scalar_tensor(is_known ? 100 * checkpoint_.best.front().value : 0.0, at::kDouble);
  }

  Dict scaler() const {
    Dict dict = make_dict();
    put(dict, "scale", checkpoint_.scaler.at("scale").item<double>());
    put(dict, "growth_factor", config_.scaler.growth_factor);
    put(dict, "backoff_factor", config_.scaler.backoff_factor);
    put(dict, "growth_interval", config_.scaler.growth_interval);
    put(dict, "_growth_tracker", checkpoint_.scaler.at("growth_tracker").item<int64_t>());
    return dict;
  }

  // ---- the optimizer ----------------------------------------------------------------------------

  /// The optimizer's rate at the first step.
  double initial_lr() const {
    const auto ranks = static_cast<int>(checkpoint_.world_size);
    return scaled_lr(*optimizer_, config_.local_batch_size(ranks) * ranks);
  }

  /// Rates of the groups when the optimizer's is `lr`.
  std::vector<double> rates(double lr) const {
    std::vector<double> all;
    for (const auto& group : groups_) all.push_back(group.lr / optimizer_->base_lr() * lr);
    return all;
  }

  /// Rates of the groups in an epoch.
  std::vector<double> rates_in(int64_t epoch) const {
    const auto schedule =
        config_.schedule.make(ScheduleArgs{initial_lr(), config_.epochs, steps_per_epoch()});
    return rates(schedule->lr(epoch * steps_per_epoch()) * checkpoint_.lr_scale);
  }

  Dict optimizer() const {
    Dict states(c10::IntType::get(), c10::AnyType::get());
    auto param_groups = make_list();
    const std::vector<double> initial = rates(initial_lr());
    const std::vector<double> next = rates_in(epoch_);
    int64_t number = 0;
    for (size_t k = 0; k < groups_.size(); ++k) {
      auto numbers = make_list();
      for (const auto& [name, parameter] : groups_[k].parameters) {
        if (checkpoint_.optimizer.contains(name)) states.insert(number, state_of_one(name));
        numbers.push_back(number++);
      }
      Dict group = options();
      put(group, "lr", next[k]);
      put(group, "initial_lr", initial[k]);
      put(group, "weight_decay", groups_[k].weight_decay);
      put(group, "params", numbers);
      param_groups.push_back(group);
    }
    Dict dict = make_dict();
    put(dict, "state", states);
    put(dict, "param_groups", param_groups);
    return dict;
  }

  Dict state_of_one(const std::string& name) const {
    Dict dict = make_dict();
    // Python's RMSprop counts steps as well.
    if (config_.optimizer.type() == "rmsprop") {
      put(dict, "step", at::scalar_tensor(checkpoint_.step, at::kFloat));
    }
    for (const auto& [key, tensor] : checkpoint_.optimizer.at(name)) {
      put(dict, key, on_host(tensor));
    }
    return dict;
  }

  /// The keys of a parameter group, including those that this project lacks.
  Dict options() const {
    Dict dict = make_dict();
    const std::string& type = config_.optimizer.type();
    for (const std::string& key : python_options(type)) {
      put(dict, key, option(optimizer_section_, key));
    }
    for (const char* key : {"maximize", "differentiable", "capturable"}) put(dict, key, false);
    for (const char* key : {"foreach", "fused"}) put(dict, key, c10::IValue());
    put(dict, "decoupled_weight_decay", type == "adamw");
    return dict;
  }

  // ---- the scheduler ----------------------------------------------------------------------------

  Dict scheduler() const {
    const auto length = static_cast<int64_t>(warmup());
    if (length == 0) return scheduler_at(epoch_, options_of_schedule(), rates_in(epoch_));
    Dict linear = make_dict();
    put(linear, "start_factor", option(schedule_section_, "warmup_start"));
    put(linear, "end_factor", 1.0);
    put(linear, "total_iters", length);
    const int64_t last_of_linear = std::min(epoch_, length - 1);
    auto parts = make_list();
    parts.push_back(scheduler_at(last_of_linear, linear, rates_in(last_of_linear)));
    parts.push_back(epoch_ < length
                        ? scheduler_at(-1, options_of_schedule(), rates(initial_lr()))
                        : scheduler_at(epoch_ - length, options_of_schedule(), rates_in(epoch_)));
    auto milestones = make_list();
    milestones.push_back(length);
    Dict dict = make_dict();
    put(dict, "_milestones", milestones);
    put(dict, "last_epoch", epoch_);
    put(dict, "_last_lr", list_of(rates_in(epoch_)));
    put(dict, "_schedulers", parts);
    return dict;
  }

  Dict options_of_schedule() const {
    Dict dict = make_dict();
    const std::string& type = config_.schedule.type();
    if (type == "cosine") {
      put(dict, "T_max", config_.epochs - static_cast<int64_t>(warmup()));
      put(dict, "eta_min", option(schedule_section_, "min_lr"));
      return dict;
    }
    put(dict, "gamma", option(schedule_section_, "gamma"));
    if (type == "step") {
      put(dict, "step_size", option(schedule_section_, "step_size").toScalar().toLong());
    }
    // MultiStepLR's milestones are a collections.Counter, which libtorch cannot write. The script
    // keeps those that it was started with.
    return dict;
  }

  /// The state of a scheduler after `epoch` epochs.
  /// @param epoch -1: SequentialLR has not started it yet
  Dict scheduler_at(int64_t epoch, Dict dict, const std::vector<double>& last) const {
    put(dict, "base_lrs", list_of(rates(initial_lr())));
    put(dict, "last_epoch", epoch);
    put(dict, "_step_count", std::max<int64_t>(epoch + 1, 1));
    put(dict, "_last_lr", list_of(last));
    return dict;
  }

  static c10::impl::GenericList list_of(const std::vector<double>& numbers) {
    auto list = make_list();
    for (const double number : numbers) list.push_back(number);
    return list;
  }

  const Checkpoint& checkpoint_;
  const bool is_imagenet_;
  const Config& config_;
  const config::Value optimizer_section_;
  const config::Value schedule_section_;
  models::Model& model_;
  const std::unique_ptr<Optimizer> optimizer_;
  const std::vector<Optimizer::Group> groups_;
  const int64_t epoch_;
};

}  // namespace

Dict to_python_run(const Checkpoint& checkpoint, PythonScript script, const Config& config,
                   models::Model& model) {
  return PythonExport(checkpoint, script, config, model).make();
}

}  // namespace syncbn::train
