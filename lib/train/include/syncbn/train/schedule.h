#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include <syncbn/config/schema.h>

namespace syncbn::train {

/// The learning rate as a function of the step. Only plateau has a state.
class Schedule {
 public:
  virtual ~Schedule() = default;
  /// @param step from 0, over all epochs.
  virtual double lr(int64_t step) const = 0;
  /// Length of the rise at the start, which may be longer than the run.
  virtual double warmup_steps() const { return 0; }

  /// Takes the loss of an evaluation into account.
  virtual void observe(double /*loss*/) {}
  /// What the rate depends on besides the step, for a checkpoint.
  virtual std::map<std::string, double> state() const { return {}; }
  virtual void load(const std::map<std::string, double>& /*state*/) {}
};

/// Upper bound on numbers of epochs: keeps the number of steps within an int64_t.
inline constexpr double kMaxEpochs = 1e6;

struct ScheduleArgs {
  double lr = 0.1;  ///< the optimizer's
  int64_t epochs = 1;
  int64_t steps_per_epoch = 1;
};

/// The registry behind `schedule: {type: cosine}`. Contains constant, step, multistep, exponential,
/// cosine, poly, onecycle and plateau.
struct ScheduleKind {
  using Registry = config::Registry<std::unique_ptr<Schedule>, const ScheduleArgs&>;
  static Registry& registry();
};

}  // namespace syncbn::train
