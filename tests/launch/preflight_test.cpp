// --preflight: its judgement of the figures of all nodes, and jobs with it.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <sys/socket.h>

#include <array>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "launch/launcher.h"
#include "launch/nodes.h"
#include "preflight/gpu_check.h"
#include "preflight/link_check.h"
#include "preflight/machine_figures.h"
#include "support/connection.h"
#include "support/skip.h"

namespace syncbn::test {
namespace {

using launch::MachineFigures;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Key;
using ::testing::Not;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

/// The findings for three equal nodes, the second of which `change` modifies.
launch::PreflightFindings judge(const std::function<void(MachineFigures&)>& change) {
  std::vector<MachineFigures> nodes(
      3, {.host = "a",
          .versions = {{"syncbn-launch", "1.0"}, {"glibc", "2.36"}, {"NVIDIA driver", ""}},
          .cores = 4,
          .core_rate = 9e9,
          .slowest_rate = 8e9,
          .memory = 1'000'000'000,
          .disk_rate = 1e9,
          .open_files = 1000,
          .processes = 1000,
          .shared_memory = 1'000'000,
          .round_trip = 1e-3,
          .link_rate = 1e9});
  change(nodes[1]);
  nodes[1].host = "b";
  return launch::judge(nodes);
}

TEST(LaunchPreflightTest, NamesWhatIsUnlikeTheOtherNodes) {
  const auto outlier = [](const std::function<void(MachineFigures&)>& change) {
    const auto findings = judge(change);
    EXPECT_THAT(findings.failures, IsEmpty());
    return findings.outliers;
  };
  EXPECT_THAT(outlier([](auto&) {}), IsEmpty());
  EXPECT_THAT(outlier([](auto& node) { node.core_rate = 7e9; }), IsEmpty());
  const std::vector<std::pair<std::function<void(MachineFigures&)>, const char*>> changes{
      {[](auto& node) { node.core_rate = node.slowest_rate = 5e9; },
       "node 1 (b): its median core computes at 5.0 GFLOP/s, and the median of all nodes is 9.0 "
       "GFLOP/s"},
      {[](auto& node) { node.slowest_rate = 4e9; },
       "node 1 (b): core 0 computes at 4.0 GFLOP/s, and the median core at 9.0 GFLOP/s"},
      {[](auto& node) { node.disk_rate = 1e8; }, "node 1 (b): its disk takes 100.0 MB/s"},
      {[](auto& node) { node.link_rate = 1e8; },
       "node 1 (b): to the next node it sends 100.0 MB/s"},
      {[](auto& node) { node.round_trip = 5e-3; },
       "node 1 (b): a round trip to node 2 (a) takes 5 ms"},
      {[](auto& node) { node.clock_ahead = 3600; },
       "node 2 (a): its clock is 1 h 0 min ahead of node 0's"},
      {[](auto& node) { node.open_files = 100; },
       "node 1 (b): 100 open files (ulimit -Hn), and the median of all nodes is 1000"},
      {[](auto& node) { node.memory = 400'000'000; },
       "node 1 (b): 400.0 MB of available memory, and the median of all nodes is 1.0 GB"}};
  for (const auto& [change, line] : changes) {
    EXPECT_THAT(outlier(change), ElementsAre(HasSubstr(line)));
  }
  EXPECT_THAT(outlier([](auto& node) { node.gpus = 2; }),
              ElementsAre("node 1 (b): 2 GPUs, and node 0 (a) has 0 GPUs",
                          "node 1 (b): CUDA finds 0 of its 2 GPUs (driver, CUDA_VISIBLE_DEVICES)"));
  const launch::GpuFigures gpu{.model = "A {}", .memory_rate = 2e12};
  EXPECT_THAT(
      outlier([&](auto& node) {
        node.gpu_figures = {gpu, gpu, gpu};
        node.gpu_figures[1].memory_rate = 1.9e12;
        node.gpu_figures[2].memory_rate = 1e12;
        node.gpu_figures[2].address = "0000:03:00.0";
        node.gpu_figures.push_back({.model = "B", .memory_rate = 1e11});
      }),
      UnorderedElementsAre(
          "node 1 (b): 0 GPUs (A {}, B), and node 0 (a) has 0 GPUs",
          "node 1 (b), GPU 2 (0000:03:00.0): its memory moves 1.0 TB/s, and the median of its "
          "model (A {}) is 1.9 TB/s"));
  EXPECT_THAT(outlier([&](auto& node) {
                node.gpus = 2;
                node.gpu_figures = {gpu};
              }),
              Contains("node 1 (b): CUDA finds 1 of its 2 GPUs (driver, CUDA_VISIBLE_DEVICES)"));
  EXPECT_THAT(outlier([](auto& node) {
                node.versions = {
                    {"syncbn-launch", "1.1"}, {"glibc", "2.31"}, {"NVIDIA driver", "550.54.15"}};
              }),
              UnorderedElementsAre(
                  "node 1 (b): syncbn-launch 1.1, and node 0 (a) has syncbn-launch 1.0",
                  "node 1 (b): glibc 2.31, and node 0 (a) has glibc 2.36",
                  "node 1 (b): NVIDIA driver 550.54.15, and node 0 (a) has no NVIDIA driver"));
}

TEST(LaunchPreflightTest, NamesNodeZeroIfItIsUnlikeTheOthers) {
  std::vector<MachineFigures> nodes(3, {.host = "a", .versions = {{"glibc", "2.36"}}});
  nodes[0].versions["glibc"] = "2.31";
  nodes[0].host = "b";
  EXPECT_THAT(launch::judge(nodes).outliers,
              ElementsAre("node 0 (b): glibc 2.31, and node 1 (a) has glibc 2.36"));
}

TEST(LaunchPreflightTest, NamesWhyTheJobWouldFail) {
  EXPECT_THAT(judge([](auto& node) { node.disk_error = "/data: Read-only file system"; }).failures,
              ElementsAre("node 1 (b) cannot write to /data: Read-only file system"));
  EXPECT_THAT(judge([](auto& node) { node.link_error = "no connection"; }).failures,
              ElementsAre("node 1 (b) cannot reach node 2 (a): no connection"));
  EXPECT_THAT(judge([](auto& node) {
                node.gpu_figures = {{}, {.error = "cuInit: error"}};
              }).failures,
              ElementsAre("node 1 (b), GPU 1 cannot be used: cuInit: error"));
}

TEST(LaunchPreflightTest, FiguresSurviveTheirJourney) {
  MachineFigures figures = launch::measure_machine(".");
  figures.clock_ahead = -0.5;
  figures.gpu_figures = {{.model = "H100",
                          .address = "0000:03:00.0",
                          .memory = 80'000'000'000,
                          .memory_rate = 2e12,
                          .error = "none"}};
  const nlohmann::json sent = figures;
  EXPECT_EQ(nlohmann::json(sent.get<MachineFigures>()), sent);
  EXPECT_THAT(figures.versions, AllOf(Contains(Key("NVIDIA driver")),
                                      Contains(Pair("syncbn-launch", SYNCBN_VERSION))));
  EXPECT_GT(figures.core_rate, 0);
  EXPECT_GT(figures.disk_rate, 0) << figures.disk_error;
}

/// Measures the GPUs of the stand-in for the driver (fake_driver.cpp). Once it is loaded into the
/// process, dlopen() of the driver's name finds it.
std::vector<launch::GpuFigures> measure_gpus(const std::string& gpus, std::optional<int> listed,
                                             std::chrono::seconds patience) {
  ::setenv("FAKE_DRIVER", gpus.c_str(), 1);
  EXPECT_NE(::dlopen(SYNCBN_FAKE_DRIVER_DIR "/libcuda.so.1", RTLD_NOW), nullptr) << ::dlerror();
  return launch::measure_gpus(listed, patience);
}

TEST(LaunchPreflightTest, GpusAreMeasuredAndThoseThatFailAreNamed) {
  const auto gpus =
      measure_gpus("fine,slow,fails,hangs,dies", std::nullopt, std::chrono::seconds(5));
  ASSERT_EQ(gpus.size(), 5U);
  EXPECT_EQ(gpus[0].model, "Fake CUDA GPU");
  EXPECT_EQ(gpus[1].address, "0000:01:00.0");
  EXPECT_EQ(gpus[0].memory, 64U << 20);
  EXPECT_GT(gpus[0].memory_rate, 1.25 * gpus[1].memory_rate);
  EXPECT_GT(gpus[1].memory_rate, 0);
  EXPECT_EQ(gpus[0].error + gpus[1].error, "");
  EXPECT_EQ(gpus[2].error, "cuCtxSynchronize: CUDA_ERROR_214 (214)");
  EXPECT_EQ(gpus[3].error, "cuDevicePrimaryCtxRetain did not return within 5.0 s");
  EXPECT_EQ(gpus[4].error,
            "cuDevicePrimaryCtxRetain ended the process that measures: killed by signal 11 "
            "(SIGSEGV, Segmentation fault)");
}

TEST(LaunchPreflightTest, ADriverThatCannotBeLoadedIsNamedIfThereAreGpus) {
  SYNCBN_SKIP_UNLESS(::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL) == nullptr, "no-cuda-driver");
  const auto gpus = launch::measure_gpus(2, std::chrono::seconds(100));
  ASSERT_EQ(gpus.size(), 1U);
  EXPECT_THAT(gpus[0].error, HasSubstr("dlopen: libcuda.so.1: cannot open shared object file"));
  EXPECT_THAT(launch::measure_gpus(std::nullopt, std::chrono::seconds(100)), IsEmpty());
}

TEST(LaunchPreflightTest, ADriverThatDoesNotStartIsNamedIfThereAreGpus) {
  const std::chrono::seconds long_enough(100);
  ASSERT_EQ(measure_gpus("broken", 2, long_enough).size(), 1U);
  EXPECT_EQ(measure_gpus("broken", 2, long_enough)[0].error, "cuInit: CUDA_ERROR_999 (999)");
  EXPECT_THAT(measure_gpus("broken", std::nullopt, long_enough), IsEmpty());
  EXPECT_THAT(measure_gpus("none", 2, long_enough), IsEmpty());
  EXPECT_THAT(measure_gpus("fine", 0, long_enough), IsEmpty());
  ASSERT_EQ(measure_gpus("hangs at once", std::nullopt, std::chrono::seconds(1)).size(), 1U);
}

TEST(LaunchPreflightTest, GpusHaveLinesAndStopTheJobIfTheyFail) {
  const auto check = [](const std::string& gpus) {
    return launch({"--preflight", "echo", "started"},
                  {.env = {{"FAKE_DRIVER", gpus},
                           {"CUDA_VISIBLE_DEVICES", "0,1,2"},
                           {"LD_LIBRARY_PATH", SYNCBN_FAKE_DRIVER_DIR}}});
  };
  const auto slow = check("fine,fine,slow");
  EXPECT_EQ(slow.exit_code, 0) << slow.err;
  EXPECT_THAT(
      slow.out,
      AllOf(HasSubstr("GPU  model          address"), HasSubstr(" 1  Fake CUDA GPU  0000:01:00.0"),
            HasSubstr("GPU 2 (0000:02:00.0): its memory moves"), HasSubstr("started")));
  const auto failure = check("fine,fails,fine");
  EXPECT_EQ(failure.exit_code, 75);
  EXPECT_THAT(failure.out, AllOf(HasSubstr("GPU 1 (0000:01:00.0) cannot be used: cuCtxSynchronize"),
                                 Not(HasSubstr("started"))));
}

TEST(LaunchPreflightTest, AConnectionIsMeasuredWithTheClockOfTheOtherEnd) {
  const auto soon = std::chrono::steady_clock::now() + std::chrono::seconds(100);
  const launch::LinkServer server("0123456789abcdef", soon);
  // The server refuses a stranger, and still serves the expected client.
  launch::LinkProbe stranger("127.0.0.1", server.port(), "fedcba9876543210", soon);
  EXPECT_THROW(stranger.measure_trip(), std::exception);
  launch::LinkProbe probe("127.0.0.1", server.port(), "0123456789abcdef", soon);
  const auto trip = probe.measure_trip();
  EXPECT_LT(trip.seconds, 1);
  EXPECT_LT(std::abs(trip.clock_ahead), 1);
  EXPECT_GT(probe.measure_rate(soon), 1e4);
  // The rate has a deadline of its own.
  EXPECT_THROW(probe.measure_rate(std::chrono::steady_clock::now()), base::UnavailableError);
}

TEST(LaunchPreflightTest, ANodeThatIsPreemptedBeforeItSendsTheIdKeepsNobodyOutAndIsMeasured) {
  const auto soon = std::chrono::steady_clock::now() + std::chrono::seconds(100);
  const std::string id = "0123456789abcdef";
  const launch::LinkServer server(id, soon);
  const base::UniqueFd preempted = connect_to(server.port());
  const base::UniqueFd halfway = connect_to(server.port());
  ASSERT_TRUE(send_to(halfway, id.substr(0, 5)));
  EXPECT_LT(launch::LinkProbe("127.0.0.1", server.port(), id, soon).measure_trip().seconds, 1);
  std::this_thread::sleep_for(std::chrono::milliseconds(2500));  // a limit of 2 s would fail
  std::array<char, 8> time{};
  ASSERT_TRUE(send_to(halfway, id.substr(5) + "a"));
  EXPECT_EQ(::recv(halfway.get(), time.data(), time.size(), MSG_WAITALL), 8);
  ::shutdown(halfway.get(), SHUT_RDWR);
  ASSERT_TRUE(send_to(preempted, id + "a"));
  EXPECT_EQ(::recv(preempted.get(), time.data(), time.size(), MSG_WAITALL), 8);
}

TEST(LaunchPreflightTest, TheProgramStartsAfterTheCheckOnAllNodes) {
  for (const bool has_token : {false, true}) {
    Nodes nodes(2);
    std::vector<std::string> options{"--preflight"};
    if (has_token) {
      const std::string file = nodes.folder().write("token", "0123456789abcdef0123456789abcdef");
      std::filesystem::permissions(file, std::filesystem::perms(0600));
      options.push_back("--token_file=" + file);
    }
    nodes.start_all(2, options, shell("echo rank $RANK attempt $SYNCBN_ATTEMPT"));
    const auto results = nodes.wait();
    for (const auto& result : results) EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_THAT(results[0].out,
                AllOf(HasSubstr("node  host"), HasSubstr("\n   1  "), HasSubstr("B/s"),
                      HasSubstr("rank 0 attempt 0"), HasSubstr("rank 1 attempt 0")));
    EXPECT_THAT(results[1].out, AllOf(HasSubstr("rank 3 attempt 0"), Not(HasSubstr("host"))));
  }
}

TEST(LaunchPreflightTest, NothingStartsIfTheJobWouldFail) {
  const TempFolder folder;
  const std::string report = folder.write("report.json", R"({"exit_code": 0})");
  const auto result =
      launch({"--preflight", "--report=" + report, "echo", "started"}, {.cwd = "/proc"});
  EXPECT_EQ(result.exit_code, 75);
  EXPECT_THAT(base::read_file(report), HasSubstr(R"("exit_code": 75,)"));
  EXPECT_THAT(result.out, AllOf(HasSubstr("cannot write to /proc"), Not(HasSubstr("started"))));
}

TEST(LaunchPreflightTest, ANodeWithoutTheOptionIsRefusedAndNamed) {
  for (const bool node_0_checks : {true, false}) {
    Nodes nodes(2);
    const Words without;
    const Words with{"--preflight"};
    Program& first = nodes.start(0, 1, node_0_checks ? with : without, shell("echo started"));
    nodes.start(1, 1, node_0_checks ? without : with, shell("echo started"));
    const auto job = [](bool checks) { return checks ? "'none --preflight'" : "'none'"; };
    const std::string what =
        fmt::format("belongs to job {} (--rdzv_id), and the job at 127.0.0.1:{} is {}",
                    job(!node_0_checks), nodes.port(), job(node_0_checks));
    const auto refused = nodes[1].wait();
    EXPECT_EQ(refused.exit_code, 2);
    EXPECT_THAT(refused.err, HasSubstr(what));
    EXPECT_TRUE(first.wait_for_err(what));
    EXPECT_THAT(first.end_by(SIGTERM).out + refused.out, Not(HasSubstr("started")));
  }
}

TEST(LaunchPreflightTest, AHeadChecksItsHosts) {
  const auto result =
      launch({"--preflight", "--hosts=127.0.0.1:1,127.0.0.2:1", "sh", "-c", "echo started $RANK"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out,
              AllOf(HasSubstr("\n   1  "), HasSubstr("started 0"), HasSubstr("started 1")));
}

}  // namespace
}  // namespace syncbn::test
