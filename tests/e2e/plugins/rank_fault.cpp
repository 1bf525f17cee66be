// A schedule and a loss that make a rank fail in the first attempt of a job. SYNCBN_TEST_FAULT is
// FAULT (kill, stop, throw) PLACE (step, evaluation, checkpoint) RANK CHECKPOINT. The rank waits at
// PLACE until the file CHECKPOINT exists, and then fails.
#include <ATen/Functions.h>
#include <signal.h>
#include <syncbn/train/loss.h>
#include <syncbn/train/plugin.h>
#include <syncbn/train/schedule.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

namespace {

using namespace syncbn;

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value != nullptr ? value : "";
}

void reach(const std::string& now) {
  std::istringstream text(variable("SYNCBN_TEST_FAULT"));
  std::string fault;
  std::string place;
  std::string rank;
  std::string checkpoint;
  text >> fault >> place >> rank >> checkpoint;
  if (now != place || variable("RANK") != rank) return;
  static bool has_failed = false;
  if (variable("TORCHELASTIC_RESTART_COUNT") != "0" || std::exchange(has_failed, true)) return;
  while (!std::filesystem::exists(checkpoint)) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  if (fault == "kill") ::raise(SIGKILL);
  if (fault == "stop") ::raise(SIGSTOP);
  if (fault == "throw") throw std::runtime_error("the failure of this test");
}

struct NoOptions {
  static void describe(config::Schema<NoOptions>& /*schema*/) {}
};

class FaultySchedule : public train::Schedule {
 public:
  explicit FaultySchedule(double lr) : lr_(lr) {}

  double lr(int64_t step) const override {
    if (step == 15) reach("step");
    return lr_;
  }
  std::map<std::string, double> state() const override {
    if (++saves_ == 2) reach("checkpoint");
    return {};
  }

 private:
  double lr_;
  mutable int saves_ = 0;
};

class FaultyLoss : public train::Loss {
 public:
  at::Tensor mean(const at::Tensor& logits, const at::Tensor& target) const override {
    return at::cross_entropy_loss(logits, target);
  }
  at::Tensor each(const at::Tensor& logits, const at::Tensor& target) const override {
    reach("evaluation");
    return at::cross_entropy_loss(logits, target, {}, at::Reduction::None);
  }
};

void register_all() {
  train::ScheduleKind::registry().add<NoOptions>(
      "faulty", "fails in a step or a checkpoint",
      [](const NoOptions&, const train::ScheduleArgs& args) {
        return std::make_unique<FaultySchedule>(args.lr);
      });
  train::LossKind::registry().add<NoOptions>(
      "faulty", "fails in an evaluation",
      [](const NoOptions&, const train::LossArgs&) { return std::make_unique<FaultyLoss>(); });
}

}  // namespace

SYNCBN_PLUGIN(register_all);
