#include "run_plan.h"

#include <algorithm>
#include <cmath>

namespace syncbn::train {

using config::Duration;

bool RunPlan::reached_max_steps() const {
  return config_.max_steps && position_.step >= *config_.max_steps;
}

bool RunPlan::stopped_early() const {
  const int64_t patience = config_.early_stop.patience;
  return patience > 0 && position_.stale_evaluations >= patience;
}

bool RunPlan::is_over() const {
  return position_.sampler.epoch >= config_.epochs || reached_max_steps() || stopped_early();
}

bool RunPlan::evaluates_whole(int64_t epoch) const {
  return epoch == config_.epochs || epoch % config_.eval_interval == 0;
}

bool RunPlan::saves() const {
  const Duration& every = config_.checkpoint.every;
  if (every.unit == Duration::Unit::kSteps) {
    return position_.step % static_cast<int64_t>(every.count) == 0;
  }
  if (every.unit != Duration::Unit::kEpochs) return false;
  const double before = epochs_done() - 1.0 / static_cast<double>(loader_.num_batches());
  return std::floor(epochs_done() / every.count) > std::floor(before / every.count);
}

EpochRecord RunPlan::last_epoch() const {
  return position_.epoch_line.empty() ? EpochRecord{} : parse_line(position_.epoch_line);
}

bool RunPlan::owes_evaluation() const {
  const EpochRecord last = last_epoch();
  // Within the next epoch, the network is no longer that of the last one, even if another
  // eval_interval asks for its evaluation.
  const bool is_at_its_end = position_.sampler.consumed == 0;
  const bool is_due = evaluates_whole(last.epoch) || reached_max_steps();
  return last.epoch > 0 && last.eval.empty() && is_at_its_end && is_due;
}

int64_t RunPlan::batches_done() const {
  return position_.sampler.epoch * loader_.num_batches() + loader_.num_batches() -
         loader_.batches_left();
}

double RunPlan::epochs_done() const {
  return static_cast<double>(batches_done()) / static_cast<double>(loader_.num_batches());
}

int64_t RunPlan::total_steps_after(int64_t batches_done) const {
  const int64_t total = position_.step + config_.epochs * loader_.num_batches() - batches_done;
  return std::min(total, config_.max_steps.value_or(total));
}

data::SamplerState RunPlan::end_of_epoch() const {
  data::SamplerState next = loader_.state();
  next.epoch = std::min(position_.sampler.epoch + 1, config_.epochs);
  next.consumed = 0;
  return next;
}

}  // namespace syncbn::train
