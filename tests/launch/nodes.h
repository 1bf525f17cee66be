#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "launch/launcher.h"
#include "support/eventually.h"
#include "support/multiproc.h"

namespace syncbn::test {

/// Launchers that meet at one port.
class Nodes {
 public:
  explicit Nodes(int count) : count_(count), port_(free_port()) {}

  /// `options` follow those that name the job, and override them.
  Program& start(int rank, int nproc, const std::vector<std::string>& options,
                 const std::vector<std::string>& program) {
    std::vector<std::string> words{
        fmt::format("--nnodes={}", count_), fmt::format("--node_rank={}", rank),
        fmt::format("--nproc_per_node={}", nproc), "--master_addr=127.0.0.1",
        fmt::format("--master_port={}", port_)};
    words.insert(words.end(), options.begin(), options.end());
    words.insert(words.end(), program.begin(), program.end());
    programs_.push_back(std::make_unique<Program>(
        launch_command(words),
        RunProgramOptions{.env = {{"OMP_NUM_THREADS", "1"}}, .cwd = folder_.path()}));
    return *programs_.back();
  }

  std::vector<ProgramResult> wait() {
    std::vector<ProgramResult> results;
    for (const auto& program : programs_) results.push_back(program->wait());
    return results;
  }

  /// Whether all launchers end within kPromptly.
  bool end_promptly() const {
    const auto ended = [](const auto& program) { return has_ended(program->pid()); };
    return eventually([&] { return std::all_of(programs_.begin(), programs_.end(), ended); },
                      kPromptly);
  }

  const TempFolder& folder() const { return folder_; }
  bool has(const std::string& file) const { return std::filesystem::exists(folder_ / file); }
  int port() const { return port_; }

 private:
  const int count_;
  const int port_;
  TempFolder folder_;
  std::vector<std::unique_ptr<Program>> programs_;
};

inline std::vector<std::string> shell(const std::string& script) {
  return {"sh", "-c", script};
}

}  // namespace syncbn::test
