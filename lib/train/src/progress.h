#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "agent_channel.h"

namespace syncbn::train {

/// How far the run is, for people: through the launcher where there is one, else as a bar of its
/// own when stderr is a terminal, else not at all. Rank 0's only.
class Progress {
 public:
  explicit Progress(AgentChannel& channel);
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Shows `done` of `total` steps and a few words; seldom enough to cost nothing.
  void show(int64_t done, int64_t total, const std::string& text);

  /// Removes the bar, to let a log line stand in its place.
  void clear();

 private:
  AgentChannel& channel_;
  bool draws_;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point last_;
};

}  // namespace syncbn::train
