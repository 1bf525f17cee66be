#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <syncbn/base/atomic_file.h>

#include <deque>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "launch/launcher.h"
#include "support/multiproc.h"
#include "support/python.h"

namespace syncbn::test {

using Words = std::vector<std::string>;
using Environment = std::map<std::string, std::string>;

inline Words operator+(Words words, const Words& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

inline RunProgramOptions options_in(const TempFolder& folder, const Environment& env = {}) {
  RunProgramOptions options{.env = env, .cwd = folder.path()};
  options.env.insert({{"OMP_NUM_THREADS", "1"}, {"PYTHON_EXEC", python()}});
  return options;
}

inline std::set<std::string> names_in(const std::filesystem::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    names.insert(entry.path().filename());
  return names;
}

/// The log folder of the first attempt of the only run in `logs`.
inline std::filesystem::path attempt_in(const std::filesystem::path& logs) {
  const auto runs = names_in(logs);
  EXPECT_EQ(runs.size(), 1U);
  return logs / (runs.empty() ? "" : *runs.begin()) / "attempt_0";
}

inline std::string text_of(const std::filesystem::path& file) {
  return std::filesystem::exists(file) ? base::read_file(file) : "no file";
}

/// Launchers of one job, one per node, started in the order of their ranks.
class Job {
 public:
  explicit Job(int nodes) : nodes_(nodes) {}

  Program& start(const Words& options, const Words& program, const Environment& env = {}) {
    const Words words{fmt::format("--nnodes={}", nodes_),
                      fmt::format("--node-rank={}", programs_.size()), "--master-addr=127.0.0.1",
                      fmt::format("--master-port={}", port_)};
    return programs_.emplace_back(launch_command(words + options + program),
                                  options_in(folder_, env));
  }

  /// Checks that all succeed and returns their concatenated output.
  std::string output() {
    std::string out;
    for (Program& program : programs_) {
      const auto result = program.wait();
      EXPECT_EQ(result.exit_code, 0) << result.err;
      out += result.out;
    }
    return out;
  }

  std::deque<Program>& programs() { return programs_; }
  const TempFolder& folder() const { return folder_; }
  int port() const { return port_; }

 private:
  const int nodes_;
  const int port_ = free_port();
  const TempFolder folder_;
  std::deque<Program> programs_;
};

}  // namespace syncbn::test
