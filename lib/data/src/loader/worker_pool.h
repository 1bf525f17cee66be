#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
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
  /// Waits for the jobs that are running; the others are forgotten.
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
  void work();

  const std::shared_ptr<const BatchMaker> maker_;
  std::mutex mutex_;
  std::condition_variable has_work_;
  std::condition_variable has_finished_;
  std::deque<std::shared_ptr<PendingBatch>> queue_;  ///< those with jobs that nobody has begun
  std::vector<std::pair<const PendingBatch*, int64_t>> running_;
  const PendingBatch* waited_for_ = nullptr;  ///< until the thread that waits runs again
  bool ends_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace syncbn::data::detail
