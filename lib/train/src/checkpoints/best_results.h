#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <syncbn/train/checkpoint.h>

namespace syncbn::train {

/// What a new result changes in a run's folder, as names of files.
struct BestChange {
  bool is_best = false;
  std::optional<std::string> write;   ///< the checkpoint to write
  std::optional<std::string> aside;   ///< the new name of the present best.pt
  std::optional<std::string> remove;  ///< the one that is no longer among the best
};

/// The name of the loss of the network that has this metric: "ema_loss" for "ema_accuracy".
std::string loss_beside(const std::string& metric);

/// Adds a result to those that are kept, best first. Of equal values, the one with the lower loss
/// is better, and then the earlier one: a small split gives many networks the same accuracy.
/// @param result without a file
/// @param count number of checkpoints to keep; with 0, the list still holds the best result
BestChange add_result(std::vector<Checkpoint::Best>& best, const Checkpoint::Best& result,
                      int64_t count, bool higher_is_better);

/// Whether `value` is better than `former` by more than `min_delta`. NaN is not.
bool improves(double value, std::optional<double> former, bool higher_is_better, double min_delta);

}  // namespace syncbn::train
