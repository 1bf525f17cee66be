// The event log, as a program reads it.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/env.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "launch/launcher.h"
#include "launch/nodes.h"
#include "support/multiproc.h"

namespace syncbn::test {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::Not;
using ::testing::SizeIs;

/// The lines that are JSON objects, parsed.
std::vector<Json> events_in(const std::string& text) {
  std::vector<Json> events;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with('{')) events.push_back(Json::parse(line));
  }
  return events;
}

std::vector<Json> named(const std::vector<Json>& events, const std::string& name) {
  std::vector<Json> found;
  std::copy_if(events.begin(), events.end(), std::back_inserter(found),
               [&](const Json& event) { return event["event"] == name; });
  return found;
}

std::vector<std::string> names(const std::vector<Json>& events) {
  std::vector<std::string> result;
  result.reserve(events.size());
  for (const Json& event : events) result.push_back(event["event"]);
  return result;
}

class LaunchEventsTest : public ::testing::Test {
 protected:
  std::vector<Json> run(std::vector<std::string> words) {
    words.insert(words.begin(), "--event-log-handler=json:" + file_);
    result_ = launch(words);
    return events_in(base::read_file(file_));
  }

  TempFolder folder_;
  const std::string file_ = folder_ / "events.jsonl";
  ProgramResult result_;
};

TEST_F(LaunchEventsTest, TellsTheCourseOfARun) {
  const int port = free_port();
  const std::string port_option = fmt::format("--master_port={}", port);
  const auto events = run({"--rdzv_id=job", port_option, "sh", "-c", "true"});
  ASSERT_THAT(names(events), ElementsAre("job_started", "attempt_started", "worker_started",
                                         "worker_ended", "job_ended"));
  for (const Json& event : events) {
    EXPECT_THAT(event["time"].get<std::string>(),
                MatchesRegex("[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\\.[0-9]{3}Z"));
    EXPECT_EQ(event["host"], base::hostname());
    EXPECT_EQ(event["run_id"], "job");
    EXPECT_EQ(event["job_id"], events[0]["job_id"]);
    EXPECT_EQ(event["node_rank"], 0);
    EXPECT_EQ(event["attempt"], 0);
  }
  EXPECT_EQ(events[0]["program"], Json({"sh", "-c", "true"}));
  EXPECT_EQ(events[0]["options"], Json({"--prefix=[${rank}] ", "--event_log_handler=json:" + file_,
                                        "--rdzv_id=job", port_option}));
  EXPECT_EQ(events[0]["world_size"], 1);
  EXPECT_EQ(events[0]["nproc_per_node"], 1);
  EXPECT_EQ(events[1]["master_port"], port);
  EXPECT_EQ(events[2]["pid"], events[3]["pid"]);
  EXPECT_GT(events[2]["pid"], 0);
  EXPECT_EQ(events[3]["exit_code"], 0);
  EXPECT_EQ(events[3]["signal"], nullptr);
  EXPECT_EQ(events[3]["by_launcher"], false);
  EXPECT_GE(events[3]["seconds"], 0);
  EXPECT_EQ(events[4]["exit_code"], 0);
  EXPECT_EQ(events[4]["reason"], nullptr);
}

TEST_F(LaunchEventsTest, TellsFailuresRestartsAndWhoWasEnded) {
  const auto events = run(
      {"--nproc_per_node=2", "--max_restarts=1", "sh", "-c",
       "if [ $RANK = 1 ]; then exit $((7 + TORCHELASTIC_RESTART_COUNT)); else exec sleep 100; fi"});
  EXPECT_EQ(result_.exit_code, 8);
  const auto failures = named(events, "failure");
  ASSERT_THAT(failures, SizeIs(2));
  EXPECT_EQ(failures[0]["what"], "rank 1 failed: exit code 7");
  EXPECT_EQ(failures[0]["attempt"], 0);
  EXPECT_EQ(failures[0]["failure"]["exit_code"], 7);
  EXPECT_EQ(failures[0]["failure"]["rank"], 1);
  EXPECT_EQ(failures[1]["attempt"], 1);
  const auto restarts = named(events, "restart");
  ASSERT_THAT(restarts, SizeIs(1));
  EXPECT_EQ(restarts[0]["attempt"], 1);
  EXPECT_EQ(restarts[0]["restarts"], 1);
  EXPECT_EQ(restarts[0]["max_restarts"], 1);
  EXPECT_THAT(named(events, "worker_started"), SizeIs(4));
  const auto ends = named(events, "worker_ended");
  ASSERT_THAT(ends, SizeIs(4));
  for (const Json& end : ends) {
    EXPECT_EQ(end["by_launcher"], end["rank"] == 0);
    EXPECT_EQ(end["signal"], end["rank"] == 0 ? Json(SIGTERM) : Json(nullptr));
  }
  EXPECT_EQ(events.back()["event"], "job_ended");
  EXPECT_EQ(events.back()["exit_code"], 8);
  EXPECT_EQ(events.back()["reason"], "rank 1 failed: exit code 8");
}

TEST_F(LaunchEventsTest, HidesValuesThatAreNamedLikeSecrets) {
  const std::string report = folder_ / "report.json";
  run({"--report=" + report, "sh", "-c", "exit 9", "sh", "--hf_token=a-secret", "--password",
       "a-secret"});
  for (const auto& text : {base::read_file(file_), base::read_file(report), result_.err}) {
    EXPECT_THAT(text, AllOf(HasSubstr("--hf_token=***"), HasSubstr("--password"),
                            Not(HasSubstr("a-secret"))));
  }
}

TEST_F(LaunchEventsTest, TellsAProgramThatCannotRun) {
  const std::string odd = folder_.write("odd", "no interpreter line", true);
  const auto events = run({odd});
  ASSERT_THAT(named(events, "worker_ended"), SizeIs(1));
  EXPECT_EQ(named(events, "worker_ended")[0]["error"], "Exec format error");
  ASSERT_THAT(named(events, "failure"), SizeIs(1));
  EXPECT_THAT(named(events, "failure")[0]["what"].get<std::string>(), HasSubstr("cannot execute"));
  EXPECT_EQ(named(events, "failure")[0]["failure"], nullptr);
  EXPECT_EQ(events.back()["exit_code"], 126);
}

TEST_F(LaunchEventsTest, TellsTheSignalThatEndedTheRun) {
  Program program(
      launch_command({"--event-log-handler=json:" + file_, "sh", "-c", "echo on; exec sleep 100"}),
      {.env = {{"OMP_NUM_THREADS", "1"}}});
  ASSERT_TRUE(program.wait_until([&] { return !program.out().empty(); }));
  program.end_by(SIGTERM);
  const auto events = events_in(base::read_file(file_));
  EXPECT_EQ(events.back()["event"], "job_ended");
  EXPECT_EQ(events.back()["reason"], "ended by SIGTERM");
  EXPECT_EQ(events.back()["exit_code"], 128 + SIGTERM);
}

TEST_F(LaunchEventsTest, TellsThatTheKeeperWasKilled) {
  const auto events = run({"sh", "-c", "kill -9 $PPID; sleep 100"});
  EXPECT_EQ(result_.exit_code, 75);
  EXPECT_EQ(events.back()["event"], "job_ended");
  EXPECT_EQ(events.back()["exit_code"], 75);
  EXPECT_THAT(events.back()["reason"].get<std::string>(), HasSubstr("keeper"));
}

TEST_F(LaunchEventsTest, AddsToItsFileOrToTheLogFolder) {
  const std::string deep = folder_ / "a/b/events.jsonl";
  for (int i = 0; i < 2; ++i) launch({"--event-log-handler=json:" + deep, "true"});
  EXPECT_THAT(named(events_in(base::read_file(deep)), "job_started"), SizeIs(2));
  // A temporary one stays.
  const std::string logs = folder_ / "a";
  const auto result = launch({"--event-log-handler=json", "true"}, {.env = {{"TMPDIR", logs}}});
  EXPECT_THAT(result.err, HasSubstr("log files are in " + logs + "/syncbn-launch-"));
  const std::string path = result.err.substr(result.err.find(logs));
  const fs::path run = path.substr(0, path.find('\n'));
  EXPECT_THAT(events_in(base::read_file(run / "events.jsonl")), SizeIs(5));
}

TEST_F(LaunchEventsTest, GoesToStderrOnRequestAndNowhereByDefault) {
  EXPECT_THAT(names(events_in(launch({"--event-log-handler=console", "true"}).err)), SizeIs(5));
  EXPECT_EQ(launch({"true"}).err, "");
  EXPECT_EQ(launch({"--event-log-handler=null", "true"}).err, "");
}

TEST_F(LaunchEventsTest, EveryNodeHasItsOwn) {
  Nodes nodes(2);
  const std::string option = "--event-log-handler=json:" + folder_.path().string() + "/";
  nodes.start(0, 1, {option + "0"}, shell("touch up; exec sleep 1000"));
  nodes.start(1, 1, {option + "1"}, shell("while [ ! -e up ]; do sleep 0.01; done; exit 9"));
  for (const auto& result : nodes.wait()) EXPECT_EQ(result.exit_code, 9);
  std::set<Json> jobs;
  for (const int rank : {0, 1}) {
    const auto events = events_in(base::read_file(folder_ / std::to_string(rank)));
    EXPECT_EQ(events.front()["world_size"], nullptr);
    EXPECT_EQ(events.front()["node_rank"], rank);
    ASSERT_THAT(named(events, "attempt_started"), SizeIs(1));
    EXPECT_EQ(named(events, "attempt_started")[0]["world_size"], 2);
    EXPECT_EQ(named(events, "worker_started")[0]["rank"], rank);
    EXPECT_EQ(events.back()["exit_code"], 9);
    EXPECT_THAT(events.back()["reason"].get<std::string>(), HasSubstr("rank 1"));
    EXPECT_EQ(events.front()["job_id"], nullptr);
    jobs.insert(events.back()["job_id"]);
    // Only node 0 knows when all nodes have joined.
    const auto joined = named(events, "nodes_joined");
    ASSERT_THAT(joined, SizeIs(rank == 0 ? 1 : 0));
    if (rank != 0) continue;
    EXPECT_EQ(events[1], joined[0]);
    EXPECT_EQ(events[2]["event"], "attempt_started");
    EXPECT_EQ(joined[0]["job_id"], events[2]["job_id"]);
    EXPECT_GT(joined[0]["seconds"], 0);
  }
  EXPECT_THAT(jobs, SizeIs(1));
}

TEST_F(LaunchEventsTest, SaysOnceThatItCannotBeWritten) {
  const auto result = launch({"--event-log-handler=json:/dev/full", "true"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.err,
            "syncbn-launch: cannot write the event log /dev/full: No space left on device; it ends "
            "here\n");
}

TEST_F(LaunchEventsTest, RefusesFilesThatCannotBe) {
  const auto folder = launch({"--event-log-handler=json:" + folder_.path().string(), "true"});
  EXPECT_EQ(folder.exit_code, 2);
  EXPECT_THAT(folder.err, HasSubstr("cannot open the event log " + folder_.path().string()));
  const std::string pipe = folder_ / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_THAT(launch({"--event-log-handler=json:" + pipe, "true"}).err,
              HasSubstr("cannot open the event log " + pipe));
}

}  // namespace
}  // namespace syncbn::test
