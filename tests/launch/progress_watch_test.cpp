// Tables of what a worker reports, and of what its launcher concludes when it reports nothing.
#include "workers/progress_watch.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "launch/state_table.h"

namespace syncbn::launch {
namespace {

struct Leader : NodeLink {
  int fd() const override { return -1; }
  Clock::time_point due() const override { return Clock::time_point::max(); }
  void handle() override {}
  void send(const FromNode& message) override {
    const auto& stalled = std::get<Stalled>(message);
    told.push_back(fmt::format("stalled {}{}", stalled.seconds, stalled.ends ? ", ends" : ""));
  }

  std::vector<std::string> told;
};

/// A worker that is checked every half second.
class Watch : public StateTable {
 public:
  /// @param row "no timeout" or "no more than 5" seconds.
  explicit Watch(const std::string& row) {
    std::istringstream words(row.substr(row.find_last_of(' ')));
    int seconds = 0;
    if (words >> seconds) options_.hang_timeout = std::chrono::seconds(seconds);
  }

 private:
  std::string state() const override { return ""; }
  std::vector<std::string> happens(std::istream& words) override {
    std::string kind;
    words >> kind;
    const auto number = static_cast<uint64_t>(number_in(words, 0));
    const auto check = [this](Time now) {
      for (std::string& line : watch_.check(true, now)) leader_.told.push_back(std::move(line));
    };
    // A launcher that sleeps does not check.
    constexpr std::chrono::milliseconds kPeriod{500};
    while (kind != "sleep" && last_ + kPeriod < now_) check(last_ += kPeriod);
    last_ = now_;
    const std::map<std::string, syncbn_agent_kind> kinds{{"step", SYNCBN_AGENT_HEARTBEAT},
                                                         {"bar", SYNCBN_AGENT_PROGRESS},
                                                         {"phase", SYNCBN_AGENT_PHASE},
                                                         {"timeout", SYNCBN_AGENT_TIMEOUT}};
    if (const auto found = kinds.find(kind); found != kinds.end()) {
      syncbn_agent_record record{};
      record.kind = static_cast<uint16_t>(found->second);
      record.done = number;
      workers_[0].progress.update(record, now_);
    }
    if (kind == "named") watch_.hang_was_named(number != 0);
    check(now_);
    return std::exchange(leader_.told, {});
  }

  LaunchOptions options_;
  Output output_{OutputOptions()};
  Leader leader_;
  WorkerProcess process_;
  std::vector<Worker> workers_ = [this] {
    std::vector<Worker> one;
    one.push_back(Worker{process_});
    return one;
  }();
  Time last_ = kBegin;
  ProgressWatch watch_{options_, output_, leader_, 0, workers_, kBegin};
};

TEST(ProgressWatchTest, TellsTheLeaderOfAWorkerThatMakesNoProgress) {
  play<Watch>(R"(
    // Again and again, until the leader has it ended. To repeat a step is no progress.
    no more than 5
    1    step 1
    2    step 2
    3    step 2
    6.5  check
    7    check         => stalled 5, ends
    8.5  check
    9    check         => stalled 7, ends
    // A worker that makes steps does not hang, however often it is stopped for a while.
    no more than 5
    1    step 1
    3    step 2
    5    step 3
    7    step 4
    9    step 5
    // Neither does one that has reported no step.
    no more than 5
    1    phase 100
    99   check
    // A worker may ask for more time, and for another timeout, which the option overrules.
    no more than 5
    0    step 1
    0.5  step 2
    1    phase 60000
    65.5 check
    66   check         => stalled 5, ends
    no timeout
    0    timeout 3000
    1    step 1
    3.5  check
    4    check         => stalled 3, ends
    no more than 0
    0    timeout 3000
    1    step 1
    9    check
    // Time in which the launcher does not run does not count.
    no more than 5
    0    step 1
    0.5  step 2
    20   sleep
    24   check
    24.5 check         => stalled 5, ends
    // Without a timeout, the leader names it once.
    no timeout
    0    step 1
    29.5 check
    30   check         => stalled 30
    39.5 check
    40   check         => stalled 40
    40   named
    99   check
)");
}

TEST(ProgressWatchTest, WarnsOnceOfATimeoutThatSeesNothingOrIsTooShort) {
  play<Watch>(R"(
    no more than 5
    4.5  check
    5    check         => warning: no worker has reported a step yet, so --hang_timeout sees nothing; docs/launch.md shows how a program reports its steps
    99   check
    no more than 5
    1    bar
    99   check
    no more than 1
    0    step 1
    1    check         => stalled 1, ends
                       | warning: rank 0 has reported only one step; if a step may take longer than --hang_timeout (1.0 s), raise it to at least twice the longest step
    no more than 10
    0    step 1
    5    step 2        => warning: a step of rank 0 took 5.0 s, and --hang_timeout is 10.0 s: raise --hang_timeout to at least twice the longest step
    10   step 3
)");
}

}  // namespace
}  // namespace syncbn::launch
