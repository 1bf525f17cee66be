#include "loader/worker_pool.h"

#include <pthread.h>
#include <signal.h>
#include <syncbn/base/error.h>
#include <syncbn/base/log.h>

#include <algorithm>
#include <system_error>

namespace syncbn::data::detail {
namespace {

/// Keeps signals from the threads that are made meanwhile.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_{};
};

}  // namespace

WorkerPool::WorkerPool(std::shared_ptr<const BatchMaker> maker, int workers)
    : maker_(std::move(maker)) {
  const SignalsBlocked blocked;
  try {
    for (int i = 0; i < workers; ++i) {
      threads_.emplace_back([this] { work(); });
      ::pthread_setname_np(threads_.back().native_handle(), "syncbn-data");
    }
  } catch (const std::system_error& error) {
    if (threads_.empty()) throw;
    spdlog::warn("the loader works with {} of {} threads: {}", threads_.size(), workers,
                 base::describe_errno(error.code().value()));
  }
}

WorkerPool::~WorkerPool() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
    queue_.clear();
  }
  has_work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void WorkerPool::add(std::shared_ptr<PendingBatch> batch) {
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(batch));
  }
  has_work_.notify_all();
}

bool WorkerPool::wait(const PendingBatch& batch, std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  const auto is_done = [&] { return batch.done == batch.jobs; };
  waited_for_ = &batch;
  if (timeout.count() > 0) {
    has_finished_.wait_for(lock, timeout, is_done);
  } else {
    has_finished_.wait(lock, is_done);
  }
  waited_for_ = nullptr;
  return is_done();
}

int64_t WorkerPool::unfinished(const PendingBatch& batch) {
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::find(running_, &batch, &decltype(running_)::value_type::first);
  const int64_t job = found != running_.end() ? found->second : batch.handed_out;
  return batch.indices[static_cast<size_t>(std::min(job, std::ssize(batch.indices) - 1))];
}

void WorkerPool::clear() {
  const std::lock_guard lock(mutex_);
  queue_.clear();
}

void WorkerPool::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    has_work_.wait(lock, [this] { return ends_ || !queue_.empty(); });
    if (ends_) return;
    const std::shared_ptr<PendingBatch> batch = queue_.front();
    const int64_t job = batch->handed_out++;
    if (batch->handed_out == batch->jobs) queue_.pop_front();
    const std::pair<const PendingBatch*, int64_t> own(batch.get(), job);
    const bool can_wait = waited_for_ != nullptr && waited_for_ != batch.get();
    running_.push_back(own);
    lock.unlock();
    // With fewer processors than threads: to those that make what is waited for, or wait for it.
    if (can_wait) std::this_thread::yield();
    std::exception_ptr error = maker_->run(*batch, job);
    lock.lock();
    running_.erase(std::ranges::find(running_, own));
    if (error) batch->faults.push_back({job, std::move(error)});
    if (++batch->done == batch->jobs) has_finished_.notify_all();
  }
}

}  // namespace syncbn::data::detail
