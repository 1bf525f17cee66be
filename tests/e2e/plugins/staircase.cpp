// A plug-in with a learning rate schedule, and with the components of kinds.cpp.
#include <syncbn/train/plugin.h>
#include <syncbn/train/schedule.h>

#include <memory>

void register_kinds();

namespace {

using namespace syncbn;

struct StaircaseOptions {
  int64_t steps = 100;

  static void describe(config::Schema<StaircaseOptions>& schema) {
    schema.field("steps", &StaircaseOptions::steps, "steps of training on each stair").at_least(1);
  }
};

class Staircase : public train::Schedule {
 public:
  Staircase(double lr, int64_t steps) : lr_(lr), steps_(steps) {}
  double lr(int64_t step) const override { return lr_ / static_cast<double>(1 + step / steps_); }

 private:
  double lr_;
  int64_t steps_;
};

void register_all() {
  register_kinds();
  train::ScheduleKind::registry().add<StaircaseOptions>(
      "staircase", "falls to a half, a third, and so on",
      [](const StaircaseOptions& options, const train::ScheduleArgs& args) {
        return std::make_unique<Staircase>(args.lr, options.steps);
      });
}

}  // namespace

SYNCBN_PLUGIN(register_all);
