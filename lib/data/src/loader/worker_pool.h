#pragma once

#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "loader/pending_batch.h"

namespace syncbn::data::detail {

/// Threads that make the jobs of batches in the order the batches were added. Jobs are samples, so
/// that a slow one keeps one thread from its work and not a whole batch. Signals are left to the
/// program's other threads.
class WorkerPool {
 public:
  WorkerPool(std::shared_ptr<const BatchMaker> maker, int workers);
  /// Waits for the jobs that are running, unless the last wait() timed out: a thread that hangs in
  /// the data set is left behind, and what it uses lives as long as it does. Drops all other jobs.
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  void add(std::shared_ptr<PendingBatch> batch);

  /// Waits until all jobs of the batch are done; false after `timeout` (0: waits as long as it
  /// takes). Then the batch is the caller's.
  bool wait(const PendingBatch& batch, std::chrono::milliseconds timeout);

  /// A sample of the batch that nobody has finished; for messages.
  int64_t unfinished(const PendingBatch& batch);

  /// Forgets all batches; those that are being worked on are finished for nobody.
  void clear();

 private:
  struct State;

  const std::shared_ptr<State> state_;  ///< shared with the threads
  bool has_timed_out_ = false;          ///< the last wait()
  std::vector<std::thread> threads_;
};

}  // namespace syncbn::data::detail
