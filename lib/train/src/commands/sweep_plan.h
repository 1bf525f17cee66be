#pragma once

#include <string>
#include <vector>

namespace syncbn::train {

/// The runs of a sweep: every combination of the values of its keys.
struct SweepPlan {
  struct Run {
    std::vector<std::string> values;  ///< one for each of the sweep's keys

    /// The run's folder within the sweep's: "optimizer.lr=0.05,seed=0".
    std::string folder;
    std::vector<std::string> settings;  ///< the values as arguments of train
  };

  std::vector<std::string> keys;       ///< as given, without dashes
  std::vector<std::string> arguments;  ///< of all runs
  std::vector<Run> runs;               ///< the first key changes slowest

  /// "optimizer.lr=0.05 seed=0", for messages.
  std::string label(const Run& run) const;
};

/// Finds the arguments that give a key several values, `KEY=V1,V2` or `--KEY V1,V2`, where a value
/// may be a range of integers, `0..2`. Commas within brackets and quotes do not count.
/// @throws base::UserError when there are none, for more than 1000 runs, for two equal runs, and
///   for keys that a sweep sets itself
SweepPlan plan_sweep(const std::vector<std::string>& args);

}  // namespace syncbn::train
