#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <syncbn/data/sample_dataset.h>

namespace syncbn::data::detail {

/// A batch that is being made.
struct PendingBatch {
  struct Fault {
    int64_t place;
    std::exception_ptr error;
  };

  Batch slot;
  std::vector<int64_t> indices;
  /// Keys of the samples' random numbers, besides seed and epoch.
  std::vector<int64_t> random_keys;
  /// Samples of later batches to prefetch.
  std::vector<int64_t> read_ahead;
  int64_t seed = 0;
  int64_t epoch = 0;
  int64_t jobs = 0;  ///< one per sample, or one if the data set makes whole batches
  // The pool's mutex guards the rest while workers have the batch.
  int64_t started = 0;
  int64_t done = 0;
  std::vector<Fault> faults;
};

/// Makes batches job by job. Thread-safe.
class BatchMaker {
 public:
  explicit BatchMaker(std::shared_ptr<const Dataset> dataset);

  /// The data set if it makes samples one at a time, otherwise null.
  const SampleDataset* samples() const { return samples_; }

  /// Runs one job, and returns its exception. Writes only to the job's own part of the batch.
  std::exception_ptr run(PendingBatch& batch, int64_t job) const noexcept;

  /// "sample 17 (train/cat/3.jpg)"; without the name if `message` contains it.
  std::string describe(int64_t index, std::string_view message = "") const;

 private:
  std::shared_ptr<const Dataset> dataset_;
  const SampleDataset* samples_;
};

/// Threads that run the jobs of batches in the order in which batches were added. A job is one
/// sample, so a slow sample delays one thread and not a whole batch. The threads block all signals.
class WorkerPool {
 public:
  WorkerPool(std::shared_ptr<const BatchMaker> maker, int workers);
  /// Drops the jobs that have not started and joins the threads. If a wait() has timed out, the
  /// threads are detached instead, because one may hang; they keep alive what they use.
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  void add(std::shared_ptr<PendingBatch> batch);

  /// Waits until all jobs of the batch are done; the batch then belongs to the caller. Returns
  /// false after `timeout` (0: no limit).
  bool wait(const PendingBatch& batch, std::chrono::milliseconds timeout);

  /// The index of an unfinished sample of the batch, for messages.
  int64_t unfinished(const PendingBatch& batch);

  /// Drops all batches, and ignores the results of running jobs.
  void clear();

 private:
  struct State;

  const std::shared_ptr<State> state_;  ///< shared with the threads
  bool has_timed_out_ = false;          ///< any wait(): a thread may hang
  std::vector<std::thread> threads_;
};

}  // namespace syncbn::data::detail
