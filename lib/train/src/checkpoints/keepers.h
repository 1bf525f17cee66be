#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace syncbn::train {

/// The ranks that write a run's folder: rank 0 or, with `checkpoint.on: node`, local rank 0 of each
/// node, so that a run survives the loss of a node's disk. All ranks call all functions.
class Keepers {
 public:
  /// @param folder the run's; nodes that share its disk have one keeper together
  Keepers(bool of_each_node, const std::filesystem::path& folder);

  /// Whether this rank is a keeper.
  bool is_one() const { return is_one_; }
  int count() const { return count_; }

  /// Each keeper calls `work`. @throws as on_each_rank()
  void each(const std::function<void()>& work) const;

  /// Copies files that rank `source` names, relative to `folder`, to the keepers that lack them.
  void copy_missing(const std::filesystem::path& folder, const std::vector<std::string>& files,
                    int source) const;

 private:
  void leave_if_shared(const std::filesystem::path& folder);

  bool is_one_ = false;
  int count_ = 1;
};

}  // namespace syncbn::train
