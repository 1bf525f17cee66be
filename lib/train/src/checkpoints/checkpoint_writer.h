#pragma once

#include <cstdint>
#include <exception>
#include <thread>

#include <syncbn/train/checkpoint.h>

#include "checkpoints/best_results.h"
#include "records/run_folder.h"

namespace syncbn::train {

/// Writes a run's checkpoints, one after the other, while training goes on. Not thread-safe.
class CheckpointWriter {
 public:
  /// @param keep_last number of the last checkpoints to keep
  /// @param saved_step the step of the folder's last.pt, if it has one
  CheckpointWriter(const RunFolder& folder, int64_t keep_last, int64_t saved_step)
      : folder_(folder), keep_last_(keep_last), saved_step_(saved_step) {}
  /// Waits for the last checkpoint and drops its error.
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  /// Starts to write a checkpoint after the one before is written. Copies its tensors first, so
  /// that the run may change them.
  /// @param last whether to write last.pt, besides what `change` asks for
  /// @throws what writing the former one threw
  void save(const Checkpoint& checkpoint, const BestChange& change, bool last);

  /// Waits for the last checkpoint. @throws what writing it threw.
  void wait();

  /// The step of the newest last.pt.
  int64_t saved_step() const { return saved_step_; }

 private:
  void write(Checkpoint checkpoint, const BestChange& change, bool last, int64_t former_step) const;

  const RunFolder& folder_;
  const int64_t keep_last_;
  int64_t saved_step_;
  std::thread thread_;
  std::exception_ptr error_;
};

}  // namespace syncbn::train
