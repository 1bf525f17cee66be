// Tables of events and of the commands with which the leader of a job answers them.
#include "job/job_leader.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <syncbn/base/text.h>

#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace syncbn::launch {
namespace {

using std::chrono::milliseconds;
using std::chrono::minutes;
using std::chrono::seconds;
using Policies = JobLeader::Policies;

const JobLeader::Time kBegin{std::chrono::hours(1)};

std::string in_words(const LeaderCommand& command) {
  const std::string to = command.node == LeaderCommand::kAll ? "all" : std::to_string(command.node);
  return std::visit(
      [&]<class Message>(const Message& message) -> std::string {
        if constexpr (std::is_same_v<Message, Start>) {
          return fmt::format(
              "start {} as {}/{}{}", to, message.ranks.base, message.ranks.world_size,
              message.restart_count > 0 ? fmt::format(" restart {}", message.restart_count) : "");
        } else if constexpr (std::is_same_v<Message, Stop>) {
          return fmt::format("stop{}: {}", message.failed ? " failed" : "", message.why.what);
        } else if constexpr (std::is_same_v<Message, Finish>) {
          return fmt::format("finish {} {}", message.exit_code, message.what);
        } else if constexpr (std::is_same_v<Message, Waiting>) {
          return command.node == LeaderCommand::kHere
                     ? "say " + message.message
                     : fmt::format("tell {}: {}", to, message.message);
        } else if constexpr (std::is_same_v<Message, Refuse>) {
          return fmt::format("refuse {}: {}", to, message.message);
        } else if constexpr (std::is_same_v<Message, AskRecords>) {
          return "ask_records " + to;
        } else if constexpr (std::is_same_v<Message, NameHang>) {
          return fmt::format("hang of {}", message.rank);
        } else if constexpr (std::is_same_v<Message, Status>) {
          std::vector<std::string> lines(message.silent.begin(), message.silent.end());
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
std::string in_words(const JobRecords& saved) {
  std::string text = "save";
  for (const auto& [rank, record] : saved.messages) text += fmt::format(" {}", rank);
  for (const auto& one : saved.file.missing) text += "; " + one.node + ": " + one.why;
  return text;
}

struct Row {
  double at;            ///< seconds since the start
  std::string event;    ///< see Job::happens()
  std::string answers;  ///< separated by " | "
};

class Job {
 public:
  explicit Job(const Policies& policies) : leader_(policies, kBegin) {}

  void plays(const std::vector<Row>& rows) {
    for (size_t i = 0; i < rows.size(); ++i) {
      now_ = kBegin +
             std::chrono::duration_cast<milliseconds>(std::chrono::duration<double>(rows[i].at));
      EXPECT_EQ(happens(rows[i].event), rows[i].answers) << "row " << i << ": " << rows[i].event;
    }
  }

 private:
  std::string happens(const std::string& event) {
    std::istringstream words(event);
    std::string kind;
    int node = 0;
    words >> kind >> node;
    const auto number = [&words](int otherwise) {
      int value = 0;
      return words >> value ? value : otherwise;
    };
    const auto sends = [&](const FromNode& message) { leader_.receive(node, message, now_); };
    if (kind == "join") {  // NODE HOST WORKERS
      Hello hello{.node = node, .leads = leader_.rank_for(-1, true) == 0 && node < 1, .nproc = 1};
      std::string host = fmt::format("h{}", node);
      words >> host;
      hello.host = host == "-" ? "" : host;
      hello.nproc = number(1);
      const std::string refusal = leader_.refusal(hello);
      if (!refusal.empty()) return "refused: " + refusal;
      const int rank = leader_.rank_for(node, hello.leads);
      nodes_.insert(rank);
      leader_.join(rank, hello, now_);
    } else if (kind == "torchrun") {
      leader_.join_torchrun(node, {"default", node, 1}, now_);
    } else if (kind == "fail") {  // NODE RANK EXIT_CODE STEP; no restart helps code 2
      const int rank = number(0);
      const int code = number(1);
      const int step = number(-1);
      sends(Failed{{.attempt = attempt_,
                    .rank = rank,
                    .status = code > 128 ? code - 128 : code << 8,
                    .step = step < 0 ? std::nullopt : std::optional<uint64_t>(step),
                    .exit_code = code,
                    .may_restart = code != 2,
                    .what = fmt::format("rank {} failed", rank)}});
    } else if (kind == "ended") {
      sends(Ended{number(attempt_)});
    } else if (kind == "end") {
      sends(EndJob{number(143), "a signal"});
    } else if (kind == "leave") {
      sends(Leave{});
    } else if (kind == "pause") {
      sends(Pause{});
    } else if (kind == "alive") {
      sends(Alive{});
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
    } else if (kind == "status") {
      sends(AskStatus{});
    } else if (kind == "explain") {
      sends(AskAllRecords{});
    } else if (kind == "record") {  // NODE RANK QUESTION
      const int rank = number(0);
      sends(Record{number(1), rank, "{}"});
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
      return base::join(said, " | ");
    } else {
      EXPECT_EQ(kind, "tick");
    }
    leader_.tick(now_);
    return base::join(answers(), " | ");
  }

  std::vector<std::string> answers() {
    std::vector<std::string> all;
    if (const auto records = leader_.take_records()) all.push_back(in_words(*records));
    for (const LeaderCommand& command : leader_.take_commands()) {
      const ToNode& message = command.message;
      if (const auto* start = std::get_if<Start>(&message)) attempt_ = start->attempt;
      if (const auto* ask = std::get_if<AskRecords>(&message)) question_ = ask->question;
      if (std::holds_alternative<Refuse>(message)) nodes_.erase(command.node);
      all.push_back(in_words(command));
    }
    return all;
  }

  JobLeader::Time now_ = kBegin;
  std::set<int> nodes_;
  int attempt_ = 0;
  int question_ = 0;
  JobLeader leader_;
};

Policies given(int nodes, int max_restarts = 0) {
  return {.nnodes = {nodes, nodes},
          .join_timeout = minutes(10),
          .last_call = seconds(30),
          .shutdown_timeout = seconds(30),
          .max_restarts = max_restarts,
          .job_id = "id"};
}

Policies elastic(int min, int max, int max_restarts = 0) {
  Policies policies = given(max, max_restarts);
  policies.nnodes.min = min;
  policies.nodes_may_change = true;
  policies.names_missing_nodes = false;
  return policies;
}

const std::string kBoth = "start 0 as 0/2 | start 1 as 1/2";

TEST(JobLeaderTest, LeadsAJobOfOneNode) {
  Job(given(1)).plays({{0, "join 0 - 4", "start 0 as 0/4"}, {9, "ended 0", "finish 0 "}});
  Job(given(1)).plays({{0, "join 0 -", "start 0 as 0/1"},
                       {1, "fail 0 0 9", "stop failed: rank 0 failed"},
                       {2, "ended 0", "finish 9 rank 0 failed"}});
  Job(given(1, 2))
      .plays(
          {{0, "join 0 -", "start 0 as 0/1"},
           {1, "fail 0 0 9", "stop failed: rank 0 failed"},
           {2, "ended 0", "start 0 as 0/1 restart 1"},
           {3, "fail 0 0 9", "stop failed: rank 0 failed"},
           {3, "ended 0", ""},  // the second quick failure: waits 500 ms
           {3.4, "tick", ""},
           {3.5, "tick", "start 0 as 0/1 restart 2"},
           {4, "fail 0 0 9", "stop failed: rank 0 failed"},
           {4, "ended 0", "say no restart is left (--max_restarts=2) | finish 9 rank 0 failed"}});
}

TEST(JobLeaderTest, NoRestartHelpsSomeFailures) {
  Job(given(1, 3))
      .plays({{0, "join 0 -", "start 0 as 0/1"},
              {1, "fail 0 0 2", "stop failed: rank 0 failed"},
              {2, "ended 0", "finish 2 rank 0 failed"}});
  std::vector<Row> rows{{0, "join 0", ""}, {0, "join 1", kBoth}};
  for (int i = 0; i < 3; ++i) {  // each of them 100 s after the start of its attempt
    const double now = 100 * (i + 1);
    rows.push_back({now, "fail 1 1 9 7", "stop failed: node 1 (h1): rank 1 failed"});
    rows.push_back({now, "all",
                    fmt::format("start 0 as 0/2 restart {0} | start 1 as 1/2 "
                                "restart {0}",
                                i + 1)});
  }
  rows.back().answers =
      "say rank 1 failed (exit code 9) 3 times in a row at step 7: a restart does not help | "
      "finish 9 node 1 (h1): rank 1 failed";
  Job(given(2, 50)).plays(rows);
}

TEST(JobLeaderTest, TheFirstFailureOfAnAttemptCounts) {
  Job(given(2)).plays({{0, "join 0", ""},
                       {0, "join 1", kBoth},
                       {1, "fail 1 1 7", "stop failed: node 1 (h1): rank 1 failed"},
                       {1, "fail 0 0 8", ""},
                       {2, "all", "finish 7 node 1 (h1): rank 1 failed"}});
}

TEST(JobLeaderTest, ASignalEndsTheJobInsteadOfARestart) {
  Job(given(1, 3))
      .plays({{0, "join 0 -", "start 0 as 0/1"},
              {1, "fail 0 0 9", "stop failed: rank 0 failed"},
              {1, "signal 15", ""},
              {2, "ended 0", "finish 143 ended by a signal"}});
  // The failure would not have been followed by a restart: its code stays.
  Job(given(1)).plays({{0, "join 0 -", "start 0 as 0/1"},
                       {1, "fail 0 0 9", "stop failed: rank 0 failed"},
                       {1, "signal 15", ""},
                       {2, "ended 0", "finish 9 rank 0 failed"}});
  Job(given(2, 9))
      .plays({{0, "join 0", ""},
              {0, "join 1", kBoth},
              {1, "end 1 130", "stop: node 1 (h1): a signal"},
              {1, "fail 0 0 9", ""},
              {1, "all", "finish 130 node 1 (h1): a signal"}});
  Job(given(2)).plays({{0, "join 0", ""}, {1, "signal 2", "finish 130 ended by a signal"}});
}

TEST(JobLeaderTest, ASignalEndsTheWaitBeforeARestart) {
  Job(given(1, 9))
      .plays({{0, "join 0 -", "start 0 as 0/1"},
              {1, "fail 0 0 9", "stop failed: rank 0 failed"},
              {1, "ended 0", "start 0 as 0/1 restart 1"},
              {2, "fail 0 0 9", "stop failed: rank 0 failed"},
              {2, "ended 0", ""},
              {2.1, "signal 15", "finish 143 ended by a signal"}});
}

TEST(JobLeaderTest, ALostNodeEndsAJobOfGivenNodes) {
  Job(given(2, 9))
      .plays({{0, "join 0", ""},
              {0, "join 1", kBoth},
              {1, "lose 1", "stop failed: the launcher of node 1 (h1) is gone"},
              {2, "all", "finish 75 the launcher of node 1 (h1) is gone"}});
  // Also during the wait before a restart.
  Job(given(2, 9))
      .plays({{0, "join 0", ""},
              {0, "join 1", kBoth},
              {1, "fail 1 1", "stop failed: node 1 (h1): rank 1 failed"},
              {1, "all", "start 0 as 0/2 restart 1 | start 1 as 1/2 restart 1"},
              {2, "fail 1 1", "stop failed: node 1 (h1): rank 1 failed"},
              {2, "all", ""},
              {2.1, "lose 1", "finish 75 the launcher of node 1 (h1) is gone"}});
  // Its workers had succeeded.
  Job(given(2)).plays({{0, "join 0", ""},
                       {0, "join 1", kBoth},
                       {1, "ended 1", ""},
                       {1, "lose 1", ""},
                       {2, "ended 0", "finish 0 "}});
}

TEST(JobLeaderTest, WaitsForAllNodesAndNamesThoseThatAreMissing) {
  Job(given(3)).plays({{0, "join 0", ""},
                       {1, "join 2", ""},
                       {10, "tick", "tell all: waiting for node 1"},
                       {20, "lose 2", "tell all: waiting for nodes 1, 2"},
                       {600, "tick",
                        "finish 75 nodes 1, 2 did not arrive within 10 min 0 s "
                        "(--rdzv_conf=join_timeout=SECONDS)"},
                       {601, "join 1",
                        "finish 75 nodes 1, 2 did not arrive within 10 min 0 s "
                        "(--rdzv_conf=join_timeout=SECONDS)"}});
}

TEST(JobLeaderTest, RefusesNodesThatDoNotFit) {
  Job(given(2)).plays(
      {{0, "join 0", ""},
       {0, "join 0 x", "refused: two launchers have --node_rank=0: one on h0 and one on x"},
       {0, "join 2", "refused: h2 claims to be node 2 with 1 worker"},
       {0, "join 1 h1 0", "refused: h1 claims to be node 1 with 0 workers"},
       {0, "join 1 h1 2", "start 0 as 0/3 | start 1 as 1/3"},
       {1, "lose 1", "stop failed: the launcher of node 1 (h1) is gone"},
       {1, "join 1", "refused: the job has begun without this launcher"}});
}

TEST(JobLeaderTest, BeginsWithTheMaximumOrAfterTheLastCall) {
  Job(elastic(1, 2)).plays({{0, "join -1 a", ""}, {29, "join -1 b", kBoth}});
  Job(elastic(1, 3))
      .plays({{0, "join -1 a", ""},
              {10, "tick", "tell all: waiting for 2 more nodes (1 here, --nnodes=1:3)"},
              {30, "tick", "start 0 as 0/1"}});
  Job(elastic(2, 3))
      .plays({{0, "join -1 a", ""},
              {9, "join -1 b", ""},
              {9, "lose 1", ""},  // no longer the minimum: no last call
              {40, "tick", "tell all: waiting for 1 more node (1 here, --nnodes=2:3)"},
              {41, "join -1 b", ""},
              {71, "tick", kBoth}});
}

TEST(JobLeaderTest, ANodeThatJoinsLeavesOrIsLostCausesAnotherAttempt) {
  Job(elastic(1, 2))
      .plays({{0, "join -1 a", ""},
              {30, "tick", "start 0 as 0/1"},
              {40, "join -1 b", "stop: node 1 (b) has joined"},
              {41, "all", "start 0 as 0/2 | start 1 as 1/2"},
              {50, "leave 1", "stop: node 1 (b) leaves"},
              {51, "ended 0", ""},
              {51, "ended 1", "start 0 as 0/1 | refuse 1: it has left"},
              {60, "join -1 c", "stop: node 1 (c) has joined"},
              {61, "all", "start 0 as 0/2 | start 1 as 1/2"},
              // A failure before the loss is noticed, as its consequence, counts.
              {70, "lose 1", "stop: node 1 (c) is lost"},
              {70, "fail 0 0", ""},
              {71, "all", "start 0 as 0/1"}});
  Job(elastic(1, 2))
      .plays({{0, "join -1 a", ""},
              {0, "join -1 b", kBoth},
              {1, "fail 0 0", "stop failed: node 0 (a): rank 0 failed"},
              {1, "lose 1", ""},
              {1, "all", "start 0 as 0/1"}});
}

TEST(JobLeaderTest, NodesBeyondTheMaximumStandBy) {
  const std::string stands_by = "the job runs on 2 nodes without this one, which stands by";
  Job(elastic(2, 2, 1))
      .plays({{0, "join -1 a", ""},
              {0, "join -1 b", kBoth},
              {1, "join -1 c", "tell 2: " + stands_by},
              {2, "lose 1", "stop: node 1 (b) is lost"},
              {3, "all", "start 0 as 0/2 | start 2 as 1/2"}});
}

TEST(JobLeaderTest, WaitsForNodesInPlaceOfThoseThatAreLost) {
  std::vector<Row> rows{{0, "join -1 a", ""},
                        {0, "join -1 b", kBoth},
                        {2, "lose 1", "stop: node 1 (b) is lost"},
                        {3, "all", "tell all: waiting for 1 more node (1 here, --nnodes=2)"}};
  std::vector<Row> replaced = rows;
  replaced.push_back({4, "join -1 c", "start 0 as 0/2 | start 1 as 1/2"});
  Job(elastic(2, 2, 1)).plays(replaced);
  rows.push_back({603, "tick",
                  "finish 75 1 more node (1 here, --nnodes=2) did not arrive within 10 "
                  "min 0 s (--rdzv_conf=join_timeout=SECONDS)"});
  Job(elastic(2, 2, 1)).plays(rows);
}

TEST(JobLeaderTest, RanksHaveNoGapAfterALoss) {
  Job(elastic(2, 3))
      .plays({{0, "join -1 a 2", ""},
              {0, "join -1 b", ""},
              {0, "join -1 c", "start 0 as 0/4 | start 1 as 2/4 | start 2 as 3/4"},
              {1, "lose 1", "stop: node 1 (b) is lost"},
              {2, "all", "start 0 as 0/3 | start 2 as 2/3"}});
}

TEST(JobLeaderTest, OnlyFailuresCountAsRestarts) {
  Job(elastic(1, 2, 1))
      .plays({{0, "join -1 a", ""},
              {30, "tick", "start 0 as 0/1"},
              {40, "join -1 b", "stop: node 1 (b) has joined"},
              {41, "all", "start 0 as 0/2 | start 1 as 1/2"},
              {42, "fail 1 1 9", "stop failed: node 1 (b): rank 1 failed"},
              {43, "all", "start 0 as 0/2 restart 1 | start 1 as 1/2 restart 1"},
              {44, "fail 1 1 9", "stop failed: node 1 (b): rank 1 failed"},
              {45, "all",
               "say no restart is left (--max_restarts=1) | finish 9 node 1 (b): rank 1 failed"}});
}

TEST(JobLeaderTest, ANodeThatFailsAgainAndAgainIsLeftOut) {
  Policies policies = elastic(1, 2, 10);
  policies.exclude_failing = 2;
  const std::string exclusion =
      "b has failed 2 times in this job, which goes on without it (--exclude_failing=2)";
  Job(policies).plays(
      {{0, "join -1 a", ""},
       {0, "join -1 b", kBoth},
       {1, "fail 1 1", "stop failed: node 1 (b): rank 1 failed"},
       {1, "all", "start 0 as 0/2 restart 1 | start 1 as 1/2 restart 1"},
       {2, "join -1 c", "tell 2: the job runs on 2 nodes without this one, which stands by"},
       {3, "fail 1 1", "stop: node 1 (b) is left out: node 1 (b): rank 1 failed; " + exclusion},
       {3, "all",
        "refuse 1: " + exclusion + " | start 0 as 0/2 restart 1 | start 2 as 1/2 restart 1"},
       {4, "join -1 b", "refused: " + exclusion}});
  // The minimum is kept.
  policies.nnodes.min = 2;
  policies.exclude_failing = policies.max_restarts = 1;
  Job(policies).plays({{0, "join -1 a", ""},
                       {0, "join -1 b", kBoth},
                       {1, "fail 1 1", "stop failed: node 1 (b): rank 1 failed"}});
}

TEST(JobLeaderTest, ANodeThatDoesNotEndItsWorkersCountsAsLost) {
  const std::string late = "its workers have not ended in time";
  Job(given(2)).plays(
      {{0, "join 0", ""},
       {0, "join 1", kBoth},
       {1, "fail 0 0 7", "stop failed: node 0 (h0): rank 0 failed"},
       {2, "pause 1", ""},
       {61, "tick", ""},
       {62, "alive 1", ""},
       {91, "tick", "say node 1 (h1): " + late + "; it counts as lost | refuse 1: " + late},
       {92, "all", "finish 7 node 0 (h0): rank 0 failed"}});
}

TEST(JobLeaderTest, BelievesNoSuccessOrRankThatIsNotTheNodes) {
  const std::string why = "node 1 (h1) reported the exit code 0 as a failure";
  Job(given(2)).plays({{0, "join 0", ""},
                       {0, "join 1", kBoth},
                       {1, "leave 1", ""},  // the nodes are given
                       {1, "ended 1 7", ""},
                       {1, "end 1 0",
                        "say refused a launcher: " + why + " | refuse 1: " + why +
                            " | stop failed: the launcher of node 1 (h1) is gone"}});
  Job(given(2)).plays({{0, "join 0", ""},
                       {0, "join 1", kBoth},
                       {1, "status 0", "inquire all"},
                       {1, "workers 1 0 T 1 R 2 T", ""},
                       {1, "workers 1 1 T", ""},
                       {1, "workers 0 0 S", "status 0: S R"},
                       {2, "status 1", "inquire all"},
                       {3, "workers 1 1 R", ""},
                       {4, "tick", "status 1: node 0 (h0) does not answer R"}});
}

TEST(JobLeaderTest, JudgesAHangByTheWorkersOfAllNodes) {
  Job(given(2)).plays({{0, "join 0", ""},
                       {0, "join 1", kBoth},
                       {60, "stalled 0 31 1", "inquire all"},
                       {60, "stalled 1 31 1", ""},
                       {61, "workers 0 0 S", ""},
                       {61, "workers 1 1 T", "hang of 1"},
                       {70, "pause 1", ""},
                       {71, "stalled 0 31 1", "inquire all"},
                       {71, "workers 0 0 S", ""},
                       {72, "workers 1 1 T", "hold all"},  // it was stopped until now
                       {80, "stalled 0 31 1", "inquire all"},
                       {82, "tick", ""},  // whether node 1 lives, the heartbeats show
                       {90, "stalled 0 31 1", "inquire all"},
                       {90, "workers 0 0 S", ""},
                       {90, "fail 0 0 7", "stop failed: node 0 (h0): rank 0 failed"},
                       {90, "workers 1 1 T", ""}});
}

TEST(JobLeaderTest, CollectsTheRecordsOfAnAttemptThatFailed) {
  const std::string late = "node 1 (h1): it did not send them within 1.5 s";
  Job(given(2)).plays({{0, "join 0", ""},
                       {0, "join 1", kBoth},
                       {1, "fail 0 0 7", "stop failed: node 0 (h0): rank 0 failed"},
                       {2, "ended 0", ""},
                       {2, "ended 1", "ask_records 0 | ask_records 1"},
                       {2, "explain 1", ""},
                       {2, "record 0 0", ""},
                       {2, "record 1 0", ""},    // not its own
                       {2, "record 1 1 2", ""},  // of no question
                       {2, "records 0", ""},
                       {3.5, "tick",
                        "save 0; " + late + " | record 1 | all_records 1; " + late +
                            " | finish 7 node 0 (h0): rank 0 failed"}});
  Job(given(2)).plays(
      {{0, "join 0", ""},
       {0, "join 1", kBoth},
       {1, "lose 1", "stop failed: the launcher of node 1 (h1) is gone"},
       {2, "ended 0", "ask_records 0"},
       {2, "record 0 0", ""},
       {2, "records 0",
        "save 0; node 1 (h1): its launcher is gone | finish 75 the launcher of node 1 "
        "(h1) is gone"}});
  // While the job runs, and before.
  Job(given(2)).plays({{0, "join 0", ""},
                       {0, "explain 0", "all_records 0"},
                       {0, "join 1", kBoth},
                       {1, "explain 0", "ask_records 0 | ask_records 1"},
                       {1, "records 0", ""},
                       {1, "lose 1",
                        "stop failed: the launcher of node 1 (h1) is gone | all_records 0; "
                        "node 1 (h1): its launcher is gone"}});
}

TEST(JobLeaderTest, LeavesThroughTorchrunsBarrier) {
  const std::vector<Row> begin{{0, "join 0", ""}, {0, "torchrun 1", kBoth}};
  std::vector<Row> rows = begin;
  rows.push_back({1, "ended 0", ""});
  rows.push_back({2, "barrier 1", "finish 0 "});
  Job(given(2)).plays(rows);
  rows.back() = {2, "barrier 0",
                 "finish 75 a node that torchrun runs left before its workers had succeeded"};
  Job(given(2)).plays(rows);
  rows = begin;  // torchrun's agent would not learn of a restart
  rows.push_back({1, "fail 0 0 9", "stop failed: node 0 (h0): rank 0 failed"});
  rows.push_back({1, "ended 0", "finish 9 node 0 (h0): rank 0 failed"});
  Job(given(2, 5)).plays(rows);
}

}  // namespace
}  // namespace syncbn::launch
