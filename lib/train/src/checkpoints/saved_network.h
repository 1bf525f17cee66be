#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include <syncbn/models/model.h>
#include <syncbn/train/checkpoint.h>
#include <syncbn/train/config.h>

namespace syncbn::train {

/// The file that a command without training uses: `resume`, or best.pt or last.pt of the newest run
/// of this name.
/// @param command for messages: "eval"
/// @throws base::UserError if there is none
std::filesystem::path checkpoint_file(const std::string& command, const Config& config,
                                      const std::string& name);

/// The weights that `train eval` and `train predict` use. Not thread-safe.
class SavedNetwork {
 public:
  /// Reads checkpoint_file(). Every rank calls it.
  /// @throws base::UserError on rank 0, QuietExit on the others
  SavedNetwork(const std::string& command, const Config& config, const std::string& name);

  const std::string& path() const { return path_; }
  /// Null if the file is Python's.
  const Checkpoint* checkpoint() const { return checkpoint_ ? &*checkpoint_ : nullptr; }
  /// Whether checkpoint() has a moving average.
  bool has_average() const { return checkpoint_ && !checkpoint_->ema.empty(); }

  /// Copies the weights, or their moving average, into the model of each rank. Every rank calls it.
  /// @throws base::UserError on rank 0, QuietExit on the others, when they do not fit, or there
  ///   is no average.
  void load_into(models::Model& model, bool average = false) const;

 private:
  std::string path_;
  std::optional<Checkpoint> checkpoint_;
};

}  // namespace syncbn::train
