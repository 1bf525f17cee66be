#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <syncbn/models/model.h>
#include <syncbn/train/config.h>

#include "profile/recorder.h"

namespace syncbn::train {

/// Records some steps of a run on all ranks: those that the configuration names, and those that
/// `train profile` asks for. All ranks must make the same calls. Not thread-safe.
class Profiler {
 public:
  /// @param model must outlive it
  Profiler(const ProfileConfig& config, const models::Model& model);

  /// On rank 0: the number of steps that `train profile` asks for, or 0. Looks once a second.
  /// @param run the run's folder
  int64_t requested(const std::filesystem::path& run);
  /// Profiles `steps` steps after the current one and a warm-up, unless another profile is in
  /// progress or pending. Call it within a step, with the same number on all ranks.
  void request(int64_t steps);

  /// Call it before reading a step's batch.
  /// @param step from 1
  void begin_step(int64_t step);
  /// Returns whether the profile is complete, for write().
  bool end_step();
  /// Ends the current stretch of steps, before an evaluation.
  void pause();
  /// Whether steps that the configuration or a request asks for have not begun yet.
  bool is_pending() const { return steps_ > 0 && !has_steps(); }
  /// Whether write() has anything to write.
  bool has_steps() const { return own_.steps > 0; }

  /// Each rank writes its trace to the run's folder, or to the same path on its own node, and rank
  /// 0 the summary. If one cannot, rank 0 warns, and training goes on. Every rank calls it.
  /// @param run on rank 0 the run's folder, else empty
  /// @return on rank 0 lines for the terminal
  std::vector<std::string> write(const std::filesystem::path& run);

 private:
  using Clock = std::chrono::steady_clock;

  const models::Model& model_;
  int64_t skip_;   ///< steps until the profile begins
  int64_t steps_;  ///< steps that the profile still lacks
  std::unique_ptr<Recorder> recorder_;
  RankProfile own_;
  int64_t step_begin_ = 0;
  Clock::time_point looked_;
};

}  // namespace syncbn::train
