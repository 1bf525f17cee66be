#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <filesystem>
#include <string>
#include <vector>

#include "launch/launcher.h"
#include "support/eventually.h"
#include "support/multiproc.h"
#include "support/python.h"

namespace syncbn::test {

/// Launchers that meet at one port.
class Nodes {
 public:
  explicit Nodes(int count) : count_(count), port_(free_port()) {}

  /// `options` follow those that name the job, and override them.
  Program& start(int rank, int nproc, const Words& options, const Words& program) {
    const Words words{fmt::format("--nnodes={}", count_), fmt::format("--node_rank={}", rank),
                      fmt::format("--nproc_per_node={}", nproc), "--master_addr=127.0.0.1",
                      fmt::format("--master_port={}", port_)};
    return programs_.emplace_back(
        launch_command(words + options + program),
        RunProgramOptions{.env = {{"OMP_NUM_THREADS", "1"}, {"PYTHON_EXEC", python()}},
                          .cwd = folder_.path()});
  }
  /// Starts all nodes, in the order of their ranks.
  void start_all(int nproc, const Words& options, const Words& program) {
    for (int rank = 0; rank < count_; ++rank) start(rank, nproc, options, program);
  }
  /// The launchers, in the order in which they were started.
  Program& operator[](size_t index) { return programs_.at(index); }

  std::vector<ProgramResult> wait() {
    std::vector<ProgramResult> results;
    for (Program& program : programs_) results.push_back(program.wait());
    return results;
  }
  /// Checks that all succeed and returns their concatenated output.
  std::string output() {
    std::string out;
    for (const auto& result : wait()) {
      EXPECT_EQ(result.exit_code, 0) << result.err;
      out += result.out;
    }
    return out;
  }

  /// Whether all launchers end within kPromptly.
  bool end_promptly() const {
    const auto ended = [](const Program& program) { return has_ended(program.pid()); };
    return eventually([&] { return std::ranges::all_of(programs_, ended); }, kPromptly);
  }

  const TempFolder& folder() const { return folder_; }
  bool has(const std::string& file) const { return std::filesystem::exists(folder_ / file); }
  /// Whether ranks 0 and 1 have left the marks of until_go().
  bool both_are_up() const { return has("up0") && has("up1"); }
  int port() const { return port_; }

 private:
  const int count_;
  const int port_;
  TempFolder folder_;
  std::deque<Program> programs_;
};

inline Words shell(const std::string& script) {
  return {"sh", "-c", script};
}

/// A program that leaves a mark, and runs until the file "go" exists.
inline Words until_go() {
  return shell("touch up$RANK; while [ ! -e go ]; do sleep 0.01; done");
}

}  // namespace syncbn::test
