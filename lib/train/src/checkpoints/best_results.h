#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <syncbn/train/checkpoint.h>

namespace syncbn::train {

/// What a new result changes in a run's folder; names of files.
struct BestChange {
  bool is_best = false;
  std::optional<std::string> write;   ///< the new checkpoint
  std::optional<std::string> aside;   ///< where best.pt goes first
  std::optional<std::string> remove;  ///< the one that is no longer among the best
};

/// Adds a result to those that are kept, the best first.
/// @param result without a file
/// @param count of checkpoints to keep; of 0 the list still has the best result
BestChange add_result(std::vector<Checkpoint::Best>& best, const Checkpoint::Best& result,
                      int64_t count, bool higher_is_better);

/// Whether `value` is better than `former` by more than `min_delta`. NaN is not.
bool improves(double value, std::optional<double> former, bool higher_is_better, double min_delta);

}  // namespace syncbn::train
