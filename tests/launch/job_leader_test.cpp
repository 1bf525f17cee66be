// Tables of events and of the commands with which the leader of a job answers them.
#include "job/job_leader.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <syncbn/base/text.h>

#include <array>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "launch/state_table.h"

namespace syncbn::launch {
namespace {

std::string restarts(const Start& start) {
  return start.restart_count == 0 ? "" : fmt::format(" restart {}", start.restart_count);
}

std::string in_words(const LeaderCommand& command) {
  const std::string to = command.node == LeaderCommand::kAll ? "all" : std::to_string(command.node);
  return std::visit(
      [&]<class Message>(const Message& message) -> std::string {
        if constexpr (std::is_same_v<Message, Start>) {
          return fmt::format("start {}@{} of {}{}", to, message.ranks.base,
                             message.ranks.world_size, restarts(message));
        } else if constexpr (std::is_same_v<Message, Stop>) {
          return fmt::format("stop{}: {}", message.failed ? " failed" : "", message.why.what);
        } else if constexpr (std::is_same_v<Message, Finish>) {
          return fmt::format("finish {}{}{}", message.exit_code, message.what.empty() ? "" : " ",
                             message.what);
        } else if constexpr (std::is_same_v<Message, Waiting>) {
          return command.node == LeaderCommand::kHere
                     ? "say " + message.message
                     : fmt::format("tell {}: {}", to, message.message);
        } else if constexpr (std::is_same_v<Message, Refuse>) {
          return fmt::format("refuse {}: {}", to, message.message);
        } else if constexpr (std::is_same_v<Message, NameHang>) {
          return fmt::format("hang of {}", message.rank);
        } else if constexpr (std::is_same_v<Message, Status>) {
          std::vector<std::string> lines(message.notes.begin(), message.notes.end());
          for (const WorkerState& one : message.workers) lines.push_back(one.process);
          return fmt::format("status {}: {}", to, base::join(lines, " "));
        } else if constexpr (std::is_same_v<Message, AllRecords>) {
          std::string text = fmt::format("all_records {}", to);
          for (const auto& one : message.missing) text += "; " + one.node + ": " + one.why;
          return text;
        } else {
          return fmt::format("{} {}", type_name<ToNode>(command.message.index()), to);
        }
      },
      command.message);
}
std::string in_words(const FlightFile& saved) {
  std::string text = "save";
  for (const auto& [rank, record] : saved.records) text += fmt::format(" {}", rank);
  for (const auto& one : saved.missing) text += "; " + one.node + ": " + one.why;
  return text;
}

const std::map<std::string, FromNode> kPlain{{"leave", Leave{}},
                                             {"pause", Pause{}},
                                             {"alive", Alive{}},
                                             {"status", AskStatus{}},
                                             {"explain", AskAllRecords{}}};

/// Of a row such as "nodes 1:2 restarts 9 exclude 2"; only a range of nodes may change.
LaunchOptions options_of(const std::string& row) {
  LaunchOptions options;
  options.shutdown_timeout = std::chrono::seconds(30);
  std::istringstream words(row);
  std::string name;
  words >> name >> options.nnodes.min;
  options.c10d = words.peek() == ':';
  options.nnodes.max = options.nnodes.min;
  if (options.c10d) words.ignore() >> options.nnodes.max;
  while (words >> name) {
    words >> (name == "restarts" ? options.max_restarts : options.exclude_failing);
  }
  return options;
}

class Job : public StateTable {
 public:
  explicit Job(const std::string& row)
      : options_(options_of(row)), leader_(options_, "id", kBegin) {}

  std::string state() const override {
    constexpr std::array kNames{"Joining", "Running", "Leaving", "Finished"};
    return kNames.at(static_cast<size_t>(leader_.state()));
  }

 private:
  std::vector<std::string> happens(std::istream& words) override {
    std::string kind;
    int node = 0;
    words >> kind >> node;
    const auto number = [&words](int otherwise) { return number_in(words, otherwise); };
    const auto sends = [&](const FromNode& message) { leader_.receive(node, message, now_); };
    if (kind == "join") {  // NODE HOST WORKERS
      const bool leads = leader_.rank_for(-1, true) == 0 && node < 1;
      Hello hello{.node = node};
      std::string host = fmt::format("h{}", node);
      words >> host;
      hello.host = host == "-" ? "" : host;
      hello.nproc = number(1);
      const std::string refusal = leader_.refusal(hello);
      if (!refusal.empty()) return {"refused: " + refusal};
      const int rank = leader_.rank_for(node, leads);
      nodes_.insert(rank);
      leader_.join(rank, hello, now_);
    } else if (kind == "torchrun") {
      leader_.join_torchrun(node, {"default", node, 1}, now_);
    } else if (kind == "fail") {  // NODE RANK EXIT_CODE STEP; no restart helps code 2
      const int rank = number(0);
      const int code = number(1);
      const int step = number(-1);
      sends(Failed{{{rank, code > 128 ? code - 128 : code << 8, step},
                    attempt_,
                    code,
                    /*may_restart=*/code != 2,
                    fmt::format("rank {} failed", rank)}});
    } else if (kind == "ended") {
      sends(Ended{number(attempt_)});
    } else if (kind == "end") {
      sends(EndJob{job_failure(attempt_, number(143), "a signal")});
    } else if (kind == "stalled") {  // NODE SECONDS ENDS
      const int stalled = number(0);
      sends(Stalled{attempt_, static_cast<double>(stalled), number(0) != 0});
    } else if (kind == "workers") {  // NODE, then RANK and state of each
      std::vector<WorkerState> workers;
      std::string process;
      for (int rank = 0; words >> rank >> process;) {
        workers.push_back({.rank = rank, .host = "h", .pid = 7, .process = process});
      }
      sends(Workers{workers});
    } else if (kind == "record") {  // NODE RANK QUESTION
      const int rank = number(0);
      sends(Record{number(1), {.rank = rank}});
    } else if (kind == "records") {
      sends(Records{number(1)});
    } else if (kind == "lose") {
      nodes_.erase(node);
      leader_.lose(node, now_);
    } else if (kind == "signal") {
      leader_.end(128 + node, "ended by a signal", now_);
    } else if (kind == "barrier") {
      leader_.leave_barrier(node == 1, now_);
    } else if (kind == "all") {  // all nodes end the attempt, and send their records
      const int attempt = attempt_;
      for (const int one : std::set(nodes_)) leader_.receive(one, Ended{attempt}, now_);
      std::vector<std::string> said = answers();
      for (const int one : std::set(nodes_)) leader_.receive(one, Records{question_}, now_);
      leader_.tick(now_);
      std::ranges::copy(answers(), std::back_inserter(said));
      std::erase_if(said, [](const std::string& one) {
        return one.starts_with("ask_records") || one.starts_with("save");
      });
      return said;
    } else if (kind != "tick") {
      sends(kPlain.at(kind));
    }
    leader_.tick(now_);
    return answers();
  }

  std::vector<std::string> answers() {
    std::vector<std::string> all;
    bool was_start = false;
    if (const auto records = leader_.take_records()) all.push_back(in_words(*records));
    for (const LeaderCommand& command : leader_.take_commands()) {
      const ToNode& message = command.message;
      if (const auto* start = std::get_if<Start>(&message)) attempt_ = start->attempt;
      if (const auto* ask = std::get_if<AskRecords>(&message)) question_ = ask->question;
      if (std::holds_alternative<Refuse>(message)) nodes_.erase(command.node);
      const std::string words = in_words(command);
      const bool is_start = std::holds_alternative<Start>(message);
      if (is_start && std::exchange(was_start, true)) {  // one line for those of all nodes
        all.back().insert(all.back().find(" of "), words.substr(5, words.find(" of ") - 5));
      } else {
        all.push_back(words);
      }
    }
    return all;
  }

  std::set<int> nodes_;
  int attempt_ = 0;
  int question_ = 0;
  const LaunchOptions options_;
  JobLeader leader_;
};

TEST(JobLeaderTest, RestartsAfterAFailure) {
  play<Job>(R"(
    nodes 1
    0    join 0 - 4    => start 0@0 of 4
    9    ended 0       => finish 0
    nodes 1
    0    join 0 -      => start 0@0 of 1
    1    fail 0 0 9    => stop failed: rank 0 failed
    2    ended 0       => finish 9 rank 0 failed
    // The second quick failure is followed by a wait of 500 ms.
    nodes 1 restarts 2
    0    join 0 -      => start 0@0 of 1
    1    fail 0 0 9    => stop failed: rank 0 failed
    2    ended 0       => start 0@0 of 1 restart 1
    3    fail 0 0 9    => stop failed: rank 0 failed
    3    ended 0
    3.4  tick
    3.5  tick          => start 0@0 of 1 restart 2
    4    fail 0 0 9    => stop failed: rank 0 failed
    4    ended 0       => say no restart is left (--max_restarts=2) | finish 9 rank 0 failed
    // No restart helps some failures.
    nodes 1 restarts 3
    0    join 0 -      => start 0@0 of 1
    1    fail 0 0 2    => stop failed: rank 0 failed
    2    ended 0       => finish 2 rank 0 failed
    nodes 2 restarts 50
    0    join 0; join 1 => start 0@0 1@1 of 2
    100  fail 1 1 9 7  => stop failed: node 1 (h1): rank 1 failed
    100  all           => start 0@0 1@1 of 2 restart 1
    200  fail 1 1 9 7  => stop failed: node 1 (h1): rank 1 failed
    200  all           => start 0@0 1@1 of 2 restart 2
    300  fail 1 1 9 7  => stop failed: node 1 (h1): rank 1 failed
    300  all           => say rank 1 failed (exit code 9) 3 times in a row at step 7: a restart does not help
                       | finish 9 node 1 (h1): rank 1 failed
    // The first failure of an attempt counts.
    nodes 2
    0    join 0; join 1 => start 0@0 1@1 of 2
    1    fail 1 1 7    => stop failed: node 1 (h1): rank 1 failed
    1    fail 0 0 8
    2    all           => finish 7 node 1 (h1): rank 1 failed
)");
}

TEST(JobLeaderTest, ASignalEndsTheJobInsteadOfARestart) {
  play<Job>(R"(
    nodes 1 restarts 3
    0    join 0 -      => start 0@0 of 1
    1    fail 0 0 9    => stop failed: rank 0 failed
    1    signal 15
    2    ended 0       => finish 143 ended by a signal
    // The failure would not have been followed by a restart: its code stays.
    nodes 1
    0    join 0 -      => start 0@0 of 1
    1    fail 0 0 9    => stop failed: rank 0 failed
    1    signal 15
    2    ended 0       => finish 9 rank 0 failed
    nodes 2 restarts 9
    0    join 0; join 1 => start 0@0 1@1 of 2
    1    end 1 130     => stop: node 1 (h1): a signal
    1    fail 0 0 9; all => finish 130 node 1 (h1): a signal
    nodes 2
    0    join 0
    1    signal 2      => finish 130 ended by a signal
    // A signal ends the wait before a restart.
    nodes 1 restarts 9
    0    join 0 -      => start 0@0 of 1
    1    fail 0 0 9    => stop failed: rank 0 failed
    1    ended 0       => start 0@0 of 1 restart 1
    2    fail 0 0 9    => stop failed: rank 0 failed
    2    ended 0
    2.1  signal 15     => finish 143 ended by a signal
)");
}

TEST(JobLeaderTest, AJobOfGivenNodesNeedsAllOfThem) {
  play<Job>(R"(
    nodes 2 restarts 9
    0    join 0; join 1 => start 0@0 1@1 of 2
    1    lose 1        => stop failed: the launcher of node 1 (h1) is gone
    2    all           => finish 75 the launcher of node 1 (h1) is gone
    // Also during the wait before a restart.
    nodes 2 restarts 9
    0    join 0; join 1 => start 0@0 1@1 of 2
    1    fail 1 1      => stop failed: node 1 (h1): rank 1 failed
    1    all           => start 0@0 1@1 of 2 restart 1
    2    fail 1 1      => stop failed: node 1 (h1): rank 1 failed
    2    all
    2.1  lose 1        => finish 75 the launcher of node 1 (h1) is gone
    // Its workers had succeeded.
    nodes 2
    0    join 0; join 1 => start 0@0 1@1 of 2
    1    ended 1; lose 1
    2    ended 0       => finish 0
    // Waits for all nodes and names those that are missing.
    nodes 3
    0    join 0
    1    join 2
    10   tick          => tell all: waiting for node 1
    20   lose 2        => tell all: waiting for nodes 1, 2
    600  tick          => finish 75 nodes 1, 2 did not arrive within 10 min 0 s (--rdzv_conf=join_timeout=SECONDS)
    601  join 1        => finish 75 nodes 1, 2 did not arrive within 10 min 0 s (--rdzv_conf=join_timeout=SECONDS)
    // Refuses nodes that do not fit.
    nodes 2
    0    join 0; join 0 x => refused: two launchers have --node_rank=0: one on h0 and one on x
    0    join 2        => refused: h2 claims to be node 2 with 1 worker
    0    join 1 h1 0   => refused: h1 claims to be node 1 with 0 workers
    0    join 1 h1 2   => start 0@0 1@1 of 3
    1    lose 1        => stop failed: the launcher of node 1 (h1) is gone
    1    join 1        => refused: the job has begun without this launcher
)");
}

TEST(JobLeaderTest, NodesMayJoinAndLeave) {
  play<Job>(R"(
    nodes 1:2
    0    join -1 a
    29   join -1 b     => start 0@0 1@1 of 2
    nodes 1:3
    0    join -1 a
    10   tick          => tell all: waiting for 2 more nodes (1 here, --nnodes=1:3)
    30   tick          => start 0@0 of 1
    // Below the minimum, the last call is off.
    nodes 2:3
    0    join -1 a
    9    join -1 b; lose 1
    40   tick          => tell all: waiting for 1 more node (1 here, --nnodes=2:3)
    41   join -1 b
    71   tick          => start 0@0 1@1 of 2
    // A node that joins leaves or is lost causes another attempt.
    nodes 1:2
    0    join -1 a
    30   tick          => start 0@0 of 1
    40   join -1 b     => stop: node 1 (b) has joined
    41   all           => start 0@0 1@1 of 2
    50   leave 1       => stop: node 1 (b) leaves
    51   ended 0; ended 1 => start 0@0 of 1 | refuse 1: it has left
    60   join -1 c     => stop: node 1 (c) has joined
    61   all           => start 0@0 1@1 of 2
    70   lose 1        => stop: node 1 (c) is lost
    70   fail 0 0
    71   all           => start 0@0 of 1
    // Workers often fail before the launchers notice that a node is lost.
    nodes 1:2
    0    join -1 a; join -1 b => start 0@0 1@1 of 2
    1    fail 0 0      => stop failed: node 0 (a): rank 0 failed
    1    lose 1; all   => start 0@0 of 1
    // Nodes beyond the maximum stand by.
    nodes 2:2 restarts 1
    0    join -1 a; join -1 b => start 0@0 1@1 of 2
    1    join -1 c     => tell 2: the job runs on 2 nodes without this one, which stands by
    2    lose 1        => stop: node 1 (b) is lost
    3    all           => start 0@0 2@1 of 2
    // Waits for nodes in place of those that are lost.
    nodes 2:2 restarts 1
    0    join -1 a; join -1 b => start 0@0 1@1 of 2
    2    lose 1        => stop: node 1 (b) is lost
    3    all           => tell all: waiting for 1 more node (1 here, --nnodes=2)
    4    join -1 c     => start 0@0 1@1 of 2
    nodes 2:2 restarts 1
    0    join -1 a; join -1 b => start 0@0 1@1 of 2
    2    lose 1        => stop: node 1 (b) is lost
    3    all           => tell all: waiting for 1 more node (1 here, --nnodes=2)
    603  tick          => finish 75 1 more node (1 here, --nnodes=2) did not arrive within 10 min 0 s (--rdzv_conf=join_timeout=SECONDS)
    // Ranks have no gap after a loss.
    nodes 2:3
    0    join -1 a 2; join -1 b; join -1 c => start 0@0 1@2 2@3 of 4
    1    lose 1        => stop: node 1 (b) is lost
    2    all           => start 0@0 2@2 of 3
    // Only failures count as restarts.
    nodes 1:2 restarts 1
    0    join -1 a
    30   tick          => start 0@0 of 1
    40   join -1 b     => stop: node 1 (b) has joined
    41   all           => start 0@0 1@1 of 2
    42   fail 1 1 9    => stop failed: node 1 (b): rank 1 failed
    43   all           => start 0@0 1@1 of 2 restart 1
    44   fail 1 1 9    => stop failed: node 1 (b): rank 1 failed
    45   all           => say no restart is left (--max_restarts=1)
                       | finish 9 node 1 (b): rank 1 failed
)");
}

TEST(JobLeaderTest, ANodeThatFailsAgainAndAgainIsLeftOut) {
  play<Job>(R"(
    nodes 1:2 restarts 10 exclude 2
    0    join -1 a; join -1 b => start 0@0 1@1 of 2
    1    fail 1 1      => stop failed: node 1 (b): rank 1 failed
    1    all           => start 0@0 1@1 of 2 restart 1
    2    join -1 c     => tell 2: the job runs on 2 nodes without this one, which stands by
    3    fail 1 1      => stop: node 1 (b) is left out: node 1 (b): rank 1 failed; b has failed 2 times in this job, which goes on without it (--exclude_failing=2)
    3    all           => refuse 1: b has failed 2 times in this job, which goes on without it (--exclude_failing=2)
                       | start 0@0 2@1 of 2 restart 1
    4    join -1 b     => refused: b has failed 2 times in this job, which goes on without it (--exclude_failing=2)
    // The minimum is kept.
    nodes 2:2 restarts 1 exclude 1
    0    join -1 a; join -1 b => start 0@0 1@1 of 2
    1    fail 1 1      => stop failed: node 1 (b): rank 1 failed
)");
}

TEST(JobLeaderTest, ANodeThatDoesNotEndItsWorkersCountsAsLost) {
  play<Job>(R"(
    nodes 2
    0    join 0; join 1 => start 0@0 1@1 of 2
    1    fail 0 0 7    => stop failed: node 0 (h0): rank 0 failed
    2    pause 1
    61   tick
    62   alive 1
    91   tick          => say node 1 (h1): its workers have not ended in time; it counts as lost
                       | refuse 1: its workers have not ended in time
    92   all           => finish 7 node 0 (h0): rank 0 failed
)");
}

TEST(JobLeaderTest, BelievesNoSuccessOrRankThatIsNotTheNodes) {
  play<Job>(R"(
    nodes 2
    0    join 0; join 1 => start 0@0 1@1 of 2
    1    leave 1; ended 1 7; end 1 0 => say refused a launcher: node 1 (h1) reported the exit code 0 as a failure
                       | refuse 1: node 1 (h1) reported the exit code 0 as a failure
                       | stop failed: the launcher of node 1 (h1) is gone
    nodes 2
    0    join 0; join 1 => start 0@0 1@1 of 2
    1    status 0      => inquire all
    1    workers 1 0 T 1 R 2 T; workers 1 1 T; workers 0 0 S => status 0: S R
    2    status 1      => inquire all
    3    workers 1 1 R
    4    tick          => status 1: node 0 (h0) does not answer R
)");
}

TEST(JobLeaderTest, JudgesAHangByTheWorkersOfAllNodes) {
  play<Job>(R"(
    nodes 2
    0    join 0; join 1 => start 0@0 1@1 of 2
    60   stalled 0 31 1 => inquire all
    60   stalled 1 31 1
    61   workers 0 0 S; workers 1 1 T => hang of 1
    70   pause 1
    71   stalled 0 31 1 => inquire all
    71   workers 0 0 S
    72   workers 1 1 T => hold all
    80   stalled 0 31 1 => inquire all
    82   tick
    90   stalled 0 31 1 => inquire all
    90   workers 0 0 S; fail 0 0 7 => stop failed: node 0 (h0): rank 0 failed
    90   workers 1 1 T
)");
}

TEST(JobLeaderTest, CollectsTheRecordsOfAnAttemptThatFailed) {
  play<Job>(R"(
    nodes 2
    0    join 0; join 1 => start 0@0 1@1 of 2
    1    fail 0 0 7    => stop failed: node 0 (h0): rank 0 failed
    2    ended 0; ended 1 => ask_records 0 | ask_records 1
    2    explain 1; record 0 0; record 1 0; record 1 1 2; records 0
    3.5  tick          => save 0; node 1 (h1): it did not send them within 1.5 s | record 1
                       | all_records 1; node 1 (h1): it did not send them within 1.5 s
                       | finish 7 node 0 (h0): rank 0 failed
    nodes 2
    0    join 0; join 1 => start 0@0 1@1 of 2
    1    lose 1        => stop failed: the launcher of node 1 (h1) is gone
    2    ended 0       => ask_records 0
    2    record 0 0; records 0 => save 0; node 1 (h1): its launcher is gone
                       | finish 75 the launcher of node 1 (h1) is gone
    // While the job runs, and before.
    nodes 2
    0    join 0; explain 0 => all_records 0
    0    join 1        => start 0@0 1@1 of 2
    1    explain 0     => ask_records 0 | ask_records 1
    1    records 0; lose 1 => stop failed: the launcher of node 1 (h1) is gone
                       | all_records 0; node 1 (h1): its launcher is gone
)");
}

TEST(JobLeaderTest, LeavesThroughTorchrunsBarrier) {
  play<Job>(R"(
    nodes 2
    0    join 0; torchrun 1 => start 0@0 1@1 of 2
    1    ended 0
    2    barrier 1     => finish 0
    nodes 2
    0    join 0; torchrun 1 => start 0@0 1@1 of 2
    1    ended 0
    2    barrier 0     => finish 75 a node that torchrun runs left before its workers had succeeded
    // torchrun's agent would not learn of a restart.
    nodes 2 restarts 5
    0    join 0; torchrun 1 => start 0@0 1@1 of 2
    1    fail 0 0 9    => stop failed: node 0 (h0): rank 0 failed
    1    ended 0       => finish 9 node 0 (h0): rank 0 failed
)");
}

TEST(JobLeaderTest, ItsStatesAreThoseOfTheDocumentation) {
  const auto transitions = play<Job>(R"(
    nodes 2
    0    join 0; join 1 => start 0@0 1@1 of 2
    1    ended 0; ended 1 => finish 0
    nodes 2
    0    join 0; signal 2 => finish 130 ended by a signal
    nodes 2
    0    join 0; torchrun 1 => start 0@0 1@1 of 2
    1    ended 0
    2    barrier 1     => finish 0
    nodes 2:2 restarts 1
    0    join -1; join -1 => start 0@0 1@1 of 2
    1    lose 1        => stop: node 1 (h-1) is lost
    1    all           => tell all: waiting for 1 more node (1 here, --nnodes=2)
)");
  EXPECT_EQ(transitions, documented_transitions("Joining"));
}

}  // namespace
}  // namespace syncbn::launch
