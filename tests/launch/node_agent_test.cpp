// Tables of events and of the commands with which the agent of a node answers them.
#include "workers/node_agent.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <signal.h>

#include <array>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "launch/state_table.h"

namespace syncbn::launch {
namespace {

constexpr int kAttempt = 1;
constexpr int kFirstRank = 4;

/// Of a row such as "node 2 workers", "node 1 elastic" or "node 1 quiet".
LaunchOptions agent_options(const std::string& row) {
  LaunchOptions options;
  options.shutdown_timeout = std::chrono::seconds(30);
  std::istringstream words(row);
  std::string name;
  words >> name >> options.nproc_per_node >> name;
  options.c10d = name == "elastic";
  if (options.c10d) options.nnodes.max = 2;
  if (name == "quiet") options.message_scope = MessageScope::kOwnWorkers;
  return options;
}

class Agent : public StateTable {
 public:
  explicit Agent(const std::string& row)
      : options_(agent_options(row)), agent_(options_, kAttempt, kFirstRank) {}

  std::string state() const override {
    constexpr std::array kNames{"Running", "Finishing", "Failing", "Ending", "Killing", "Over"};
    return kNames.at(static_cast<size_t>(agent_.state()));
  }

 private:
  using Kind = KeeperEvent::Kind;

  std::vector<std::string> happens(std::istream& words) override {
    const bool was_over = agent_.state() == NodeAgent::State::kOver;
    std::string kind;
    int number = 0;  // of the worker, where there is one
    words >> kind >> number;
    const auto reports = [&](Kind event, int value) {
      agent_.receive({.kind = event, .worker = number, .pid = 100 + number, .value = value}, now_);
    };
    const auto left = [](Left what) { return std::pair(Kind::kLeft, static_cast<int>(what)); };
    const std::map<std::string, std::pair<Kind, int>> plain{
        {"start", {Kind::kStarted, 0}},           {"unstarted", {Kind::kNotStarted, 0}},
        {"no_fork", {Kind::kForkFailed, EAGAIN}}, {"helpers", left(Left::kHelpers)},
        {"daemons", left(Left::kDaemons)},        {"nothing", left(Left::kNothing)}};
    if (const auto one = plain.find(kind); one != plain.end()) {
      reports(one->second.first, one->second.second);
    } else if (kind == "no_exec") {
      reports(Kind::kExecFailed, ENOENT);
      reports(Kind::kExited, 127 << 8);
    } else if (kind == "exit") {  // WORKER CODE STEP
      const int code = number_in(words, 0);
      worker(number).step = number_in(words, 0);
      reports(Kind::kExited, code << 8);
    } else if (kind == "killed" || kind == "oom") {  // WORKER SIGNAL
      worker(number).out_of_memory = kind == "oom";
      reports(Kind::kExited, number_in(words, SIGKILL));
    } else if (kind == "signal") {
      agent_.receive(Signal{number}, now_);
    } else if (kind == "stop") {  // ATTEMPT FAILED
      agent_.receive(Stop{number_in(words, 0) != 0, job_failure(number, 7, "h2 failed")}, now_);
    } else if (kind == "hang") {  // RANK
      agent_.receive(NameHang{{.rank = number, .text = "it hangs"}}, now_);
    } else if (kind == "lost") {
      agent_.lose_keeper(77, now_);
    }
    agent_.tick(now_);
    EXPECT_GT(agent_.due(), now_);
    std::vector<std::string> all;
    for (const AgentCommand& command : agent_.take_commands()) all.push_back(in_words(command));
    std::erase(all, "");
    if (!was_over && agent_.state() == NodeAgent::State::kOver) {
      const auto& cause = agent_.cause();
      all.push_back(cause ? fmt::format("over {}", cause->exit_code) : "over, daemons go on");
    }
    return all;
  }

  /// "signal 15", "log 0: TEXT", "note" in all logs, or "note 1": but for worker 1's.
  std::string in_words(const AgentCommand& command) const {
    using enum AgentCommand::Kind;
    constexpr std::array kNames{"signal", "threads", "kill", "note",    "fail",
                                "log",    "say",     "name", "helpers", "give up"};
    const auto& [kind, number, text] = command;
    std::string words = kNames.at(static_cast<size_t>(kind));
    if (number >= 0) words += fmt::format(" {}", number);
    if (kind == kNote) {
      EXPECT_EQ(text, "an error: " + agent_.cause()->what);
    } else if (kind == kFail) {
      const JobFailure& why = *agent_.cause();
      words += fmt::format(" {}{}", why.exit_code, why.may_restart ? "" : " for good");
      if (why.step >= 0) words += fmt::format(" at {}", why.step);
      words += ": " + why.what;
    } else if (!text.empty()) {
      words += ": " + text;
    } else if (kind == kLogEnd) {
      return "";
    }
    return words;
  }

  WorkerProcess& worker(int index) { return agent_.workers().at(static_cast<size_t>(index)); }

  const LaunchOptions options_;
  NodeAgent agent_;
};

constexpr const char* kFailures = R"(
    node 3 workers
    1    exit 1 9 7    => note 1 | fail 9 at 7: rank 5 failed: exit code 9 | signal 15 | signal 18
    1.9  tick
    2    tick          => say: rank 5 failed (exit code 9); waiting for 2 other workers to end
    3    exit 0 1; killed 2 15
    3    nothing       => over 9
    // Those that do not end are killed after the grace period.
    node 2 workers
    1    killed 0 11   => note | fail 139 at 0: rank 4 failed: killed by signal 11 (SIGSEGV, Segmentation fault)
                       | signal 15 | signal 18
    2    tick          => say: rank 4 failed (killed by signal 11 (SIGSEGV, Segmentation fault)); waiting for 1 other worker to end
    30.9 tick
    31   tick          => say: workers still run 30.0 s after the signal to end, and are killed | signal 9
    31   killed 1 9    => over 139
    // A worker that was preempted has noted it.
    node 1 worker
    1    exit 0 85     => fail 85 for good at 0: rank 4 failed: exit code 85 | signal 15 | signal 18
    // A user's signal announces the end of the job's time to a worker that does not handle it.
    node 1 worker
    1    killed 0 10   => note | fail 138 for good at 0: rank 4 failed: killed by signal 10 (SIGUSR1, User defined signal 1)
                       | signal 15 | signal 18
    // Who killed it from outside did not do so at a step.
    node 1 worker
    1    killed 0 15   => note | fail 143: rank 4 failed: killed by signal 15 (SIGTERM, Terminated)
                       | signal 15 | signal 18
    // A signal of the user's announces the end of the job's time to a worker that does not handle it.
    node 1 worker
    1    killed 0 10   => note | fail 138 for good at 0: rank 4 failed: killed by signal 10 (SIGUSR1, User defined signal 1)
                       | signal 15 | signal 18
    // Rank 0 may print a usage error that another worker has found first.
    node 2 workers
    1    exit 1 2      => note 1 | fail 2 for good at 0: rank 5 failed: exit code 2
    1.9  exit 0 2
    1.9  nothing       => over 2
    node 2 workers
    1    exit 1 2      => note 1 | fail 2 for good at 0: rank 5 failed: exit code 2
    2    tick          => signal 15 | signal 18
    node 2 workers
    1    exit 0 2      => note 0 | fail 2 for good at 0: rank 4 failed: exit code 2 | signal 15 | signal 18
    // Until memory is free, the others cannot act on a signal.
    node 2 workers
    1    oom 1         => note | fail 137: rank 5 failed: killed by signal 9 (SIGKILL, Killed), probably by the kernel's OOM killer (out of memory)
                       | signal 15 | signal 18
    3.9  tick          => say: rank 5 failed (killed by signal 9 (SIGKILL, Killed)); waiting for 1 other worker to end
    4    tick          => say: workers still run 3.0 s after the signal to end, and are killed | signal 9
    // Workers that could not be started.
    node 2 workers
    1    no_exec 0     => log 0: No such file or directory | note 0
                       | fail 127 for good at 0: rank 4 failed: cannot be started | signal 15 | signal 18
    node 1 worker
    1    no_fork 0     => log 0: Resource temporarily unavailable | note 0
                       | fail 75 for good at 0: rank 4 failed: cannot be started | signal 15 | signal 18
)";

constexpr const char* kSignals = R"(
    node 2 workers
    1    signal 10     => signal 10
    1    signal 12     => signal 12
    2    signal 2      => signal 2 | signal 18
    3    exit 0; unstarted 1
    3    nothing       => over 130
    // The second one kills.
    node 2 workers
    0    start 0; start 1
    1    signal 15     => signal 15 | signal 18
    2    signal 2      => signal 9
    2    killed 0; killed 1 => over 143
    // What is left then is the keeper's.
    2    daemons
    // SIGKILL does not help. The keeper hangs as well, and has not forked the second worker.
    node 2 workers
    0    start 0
    1    signal 15     => signal 15 | signal 18
    31   tick          => say: workers still run 30.0 s after the signal to end, and are killed | signal 9
    36   tick          => log 0: did not end after SIGKILL | say: rank 4 (pid 100) did not end after SIGKILL; it is left running
                       | over 143
    // A signal after a failure neither hides it nor shortens the grace period.
    node 2 workers
    1    exit 1 4      => note 1 | fail 4 at 0: rank 5 failed: exit code 4 | signal 15 | signal 18
    1.5  signal 15
    2    tick          => say: rank 5 failed (exit code 4); waiting for 1 other worker to end
    30.9 tick
    30.9 exit 0; nothing => over 4
    // Also before the others have been told.
    node 2 workers
    1    exit 1 2      => note 1 | fail 2 for good at 0: rank 5 failed: exit code 2
    1.5  signal 2      => signal 2 | signal 18
)";

constexpr const char* kHelpers = R"(
    node 1 worker
    1    exit 0
    1    helpers
    2    tick          => helpers: all workers have ended; waiting up to 30.0 s (--shutdown_timeout) for processes that they started
    9    nothing       => over, daemons go on
    node 1 worker
    1    exit 0; helpers
    2    tick          => helpers: all workers have ended; waiting up to 30.0 s (--shutdown_timeout) for processes that they started
    31   tick          => helpers: processes that the workers started still run after 30.0 s, and get SIGTERM | signal 15 | signal 18
    33.9 tick
    34   tick          => over, daemons go on
    // Daemons have 3 s to clean up.
    node 1 worker
    1    exit 0; daemons
    3.9  tick
    4    tick          => over, daemons go on
    node 1 worker
    1    exit 0; helpers
    1.5  daemons
    4.5  tick          => over, daemons go on
    // After a failure or a signal, neither are spared.
    node 1 worker
    1    exit 0 3      => note 0 | fail 3 at 0: rank 4 failed: exit code 3 | signal 15 | signal 18
    1    helpers       => signal 15 | signal 18
    4    tick          => over 3
    node 1 worker
    1    exit 0; helpers
    1.5  signal 15     => signal 15 | signal 18
    2    signal 15     => signal 9 | over 143
    node 1 worker
    1    exit 0; daemons; stop 1 => say: h2 failed; ending the workers of this node | signal 15 | signal 18
    1    nothing       => over 7
)";

constexpr const char* kLeader = R"(
    node 1 worker
    1    stop 0 1
    2    stop 1 1      => say: h2 failed; ending the workers of this node | note | signal 15 | signal 18
    3    exit 0 9; nothing => over 7
    node 1 quiet
    1    stop -1       => signal 15 | signal 18
    // The failure of this node stays.
    node 1 worker
    1    exit 0 9      => note 0 | fail 9 at 0: rank 4 failed: exit code 9 | signal 15 | signal 18
    1    stop 1 1; nothing => over 9
    // A worker hangs, here or on another node.
    node 2 workers
    60   hang 5        => name 0: it hangs | threads 1 | note
                       | fail 137 at 0: rank 5 failed: it made no progress (--hang_timeout) | kill 1
                       | signal 15 | signal 18
    60   killed 1; exit 0; nothing => over 137
    node 1 worker
    60   hang 9        => name 0: it hangs
    // Neither workers that are paused hang, nor those that end.
    node 1 worker
    1    signal 19     => signal 19
    2    hang 4
    3    signal 18     => signal 18
    4    signal 15     => signal 15 | signal 18
    5    hang 4
)";

constexpr const char* kKeeper = R"(
    node 1 worker
    1    lost          => fail 75 for good: the keeper process (pid 77) was killed; all workers have been killed
                       | give up | over 75
    // The others take this node for lost, and go on.
    node 1 elastic
    1    lost          => give up | over 75
    node 2 workers
    1    exit 0 3      => note 0 | fail 3 at 0: rank 4 failed: exit code 3 | signal 15 | signal 18
    1    lost          => say: the keeper process (pid 77) was killed; all workers have been killed
                       | log 1: killed with the keeper process | over 3
    node 1 worker
    1    exit 0; helpers; lost => over, daemons go on
)";

TEST(NodeAgentTest, AFailureEndsTheOtherWorkers) {
  play<Agent>(kFailures);
}

TEST(NodeAgentTest, ASignalEndsTheWorkersAndASecondOneKillsThem) {
  play<Agent>(kSignals);
}

TEST(NodeAgentTest, HelpersMayEndByThemselvesAfterSuccess) {
  play<Agent>(kHelpers);
}

TEST(NodeAgentTest, TheLeaderStopsAnAttemptAndNamesAHang) {
  play<Agent>(kLeader);
}

TEST(NodeAgentTest, AKeeperThatIsKilledIsAFailureUnlessThereIsOne) {
  play<Agent>(kKeeper);
}

TEST(NodeAgentTest, ItsStatesAreThoseOfTheDocumentation) {
  std::set<std::string> all;
  for (const char* rows : {kFailures, kSignals, kHelpers, kLeader, kKeeper}) {
    all.merge(play<Agent>(rows));
  }
  EXPECT_EQ(all, documented_transitions("Running"));
}

}  // namespace
}  // namespace syncbn::launch
