#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "commands/sweep_plan.h"

namespace syncbn::train {

constexpr const char* kFinished = "finished";

/// The state of a run of a sweep.
struct SweepResult {
  const SweepPlan::Run* run = nullptr;
  std::filesystem::path folder;
  std::string state;  ///< kFinished, "failed (75)", "stopped", "not run"
};

/// The results as a table for a terminal: finished runs first, the best one on top. Numbers of
/// epochs and ranks are shown if they differ.
std::string sweep_table(const SweepPlan& plan, const std::vector<SweepResult>& results);

/// The results with every value of result.json, as comma-separated values (RFC 4180).
std::string sweep_csv(const SweepPlan& plan, const std::vector<SweepResult>& results);

}  // namespace syncbn::train
