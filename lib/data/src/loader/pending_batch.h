#pragma once

#include <cstdint>
#include <exception>
#include <vector>

#include <syncbn/data/sample_dataset.h>

namespace syncbn::data::detail {

/// A batch on its way: its memory, what goes into it, and how far it is.
struct PendingBatch {
  struct Fault {
    int64_t place;
    std::exception_ptr error;
  };

  Batch slot;
  std::vector<int64_t> indices;
  /// What the samples' random numbers are keyed by, besides seed and epoch.
  std::vector<int64_t> random_keys;
  /// Samples that storage is asked for meanwhile.
  std::vector<int64_t> ahead;
  int64_t seed = 0;
  int64_t epoch = 0;
  int64_t jobs = 0;  ///< one per sample, or one for a batch that is made at once
  // What follows is guarded by the pool's mutex while workers have the batch.
  int64_t handed_out = 0;
  int64_t done = 0;
  std::vector<Fault> faults;
};

/// Makes batches of a data set, job by job. Thread-safe.
class BatchMaker {
 public:
  explicit BatchMaker(std::shared_ptr<const Dataset> dataset);

  /// The data set, when its samples are made one at a time.
  const SampleDataset* samples() const { return samples_; }

  /// Runs one job; its exception becomes a fault. Nothing but the job's own place is written.
  std::exception_ptr run(PendingBatch& batch, int64_t job) const noexcept;

  /// "sample 17 (train/cat/3.jpg)"
  std::string describe(int64_t index) const;

 private:
  std::shared_ptr<const Dataset> dataset_;
  const SampleDataset* samples_;
};

}  // namespace syncbn::data::detail
