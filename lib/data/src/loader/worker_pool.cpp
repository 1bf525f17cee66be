#include "loader/worker_pool.h"

#include <pthread.h>
#include <signal.h>
#include <syncbn/base/error.h>
#include <syncbn/base/log.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
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

struct WorkerPool::State {
  void work();

  const std::shared_ptr<const BatchMaker> maker;
  std::mutex mutex = {};
  std::condition_variable has_work = {};
  std::condition_variable has_finished = {};
  std::deque<std::shared_ptr<PendingBatch>> queue = {};  ///< those with jobs that nobody has begun
  std::vector<std::pair<const PendingBatch*, int64_t>> running = {};
  const PendingBatch* waited_for = nullptr;  ///< until the thread that waits runs again
  bool ends = false;
};

WorkerPool::WorkerPool(std::shared_ptr<const BatchMaker> maker, int workers)
    : state_(new State{.maker = std::move(maker)}) {
  const SignalsBlocked blocked;
  try {
    for (int i = 0; i < workers; ++i) {
      threads_.emplace_back([state = state_] { state->work(); });
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
    const std::lock_guard lock(state_->mutex);
    state_->ends = true;
    state_->queue.clear();
  }
  state_->has_work.notify_all();
  for (std::thread& thread : threads_) has_timed_out_ ? thread.detach() : thread.join();
}

void WorkerPool::add(std::shared_ptr<PendingBatch> batch) {
  {
    const std::lock_guard lock(state_->mutex);
    state_->queue.push_back(std::move(batch));
  }
  state_->has_work.notify_all();
}

bool WorkerPool::wait(const PendingBatch& batch, std::chrono::milliseconds timeout) {
  std::unique_lock lock(state_->mutex);
  const auto is_done = [&] { return batch.done == batch.jobs; };
  state_->waited_for = &batch;
  if (timeout.count() > 0) {
    state_->has_finished.wait_for(lock, timeout, is_done);
  } else {
    state_->has_finished.wait(lock, is_done);
  }
  state_->waited_for = nullptr;
  has_timed_out_ = !is_done();
  return !has_timed_out_;
}

int64_t WorkerPool::unfinished(const PendingBatch& batch) {
  const std::lock_guard lock(state_->mutex);
  const auto& running = state_->running;
  const auto found = std::ranges::find(running, &batch, [](const auto& own) { return own.first; });
  const int64_t job = found != running.end() ? found->second : batch.handed_out;
  return batch.indices[static_cast<size_t>(std::min(job, std::ssize(batch.indices) - 1))];
}

void WorkerPool::clear() {
  const std::lock_guard lock(state_->mutex);
  state_->queue.clear();
}

void WorkerPool::State::work() {
  std::unique_lock lock(mutex);
  while (true) {
    has_work.wait(lock, [this] { return ends || !queue.empty(); });
    if (ends) return;
    const std::shared_ptr<PendingBatch> batch = queue.front();
    const int64_t job = batch->handed_out++;
    if (batch->handed_out == batch->jobs) queue.pop_front();
    const std::pair<const PendingBatch*, int64_t> own(batch.get(), job);
    const bool can_wait = waited_for != nullptr && waited_for != batch.get();
    running.push_back(own);
    lock.unlock();
    // With fewer processors than threads: to those that make what is waited for, or wait for it.
    if (can_wait) std::this_thread::yield();
    std::exception_ptr error = maker->run(*batch, job);
    lock.lock();
    running.erase(std::ranges::find(running, own));
    if (error) batch->faults.push_back({job, std::move(error)});
    if (++batch->done == batch->jobs) has_finished.notify_all();
  }
}

}  // namespace syncbn::data::detail
