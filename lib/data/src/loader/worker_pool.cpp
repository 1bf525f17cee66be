#include "loader/worker_pool.h"

#include <fmt/format.h>
#include <signal.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>

#include <ATen/record_function.h>

#include <syncbn/base/error.h>
#include <syncbn/base/log.h>
#include <syncbn/base/signal_mask.h>

namespace syncbn::data::detail {

BatchMaker::BatchMaker(std::shared_ptr<const Dataset> dataset)
    : dataset_(std::move(dataset)), samples_(dynamic_cast<const SampleDataset*>(dataset_.get())) {}

std::exception_ptr BatchMaker::run(PendingBatch& batch, int64_t job) const noexcept {
  try {
    if (samples_ == nullptr) {
      batch.slot = dataset_->get_batch(batch.indices);
      return nullptr;
    }
    if (job == 0 && !batch.read_ahead.empty()) samples_->prefetch(batch.read_ahead);
    const auto place = static_cast<size_t>(job);
    SampleRandom random(batch.seed, batch.epoch, batch.random_keys[place]);
    samples_->read_sample(batch.indices[place], random, SampleDataset::slot_of(batch.slot, job));
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

std::string BatchMaker::describe(int64_t index, std::string_view message) const {
  const std::string name = samples_ == nullptr ? "" : samples_->name_of(index);
  if (message.find(name) != message.npos) return fmt::format("sample {}", index);
  return fmt::format("sample {} ({})", index, name);
}

struct WorkerPool::State {
  void work();

  const std::shared_ptr<const BatchMaker> maker;
  std::mutex mutex = {};
  std::condition_variable has_work = {};
  std::condition_variable has_finished = {};
  std::deque<std::shared_ptr<PendingBatch>> queue = {};  ///< batches with jobs to start
  std::vector<std::pair<const PendingBatch*, int64_t>> running = {};
  const PendingBatch* waited_for = nullptr;
  bool is_ending = false;
};

WorkerPool::WorkerPool(std::shared_ptr<const BatchMaker> maker, int workers)
    : state_(new State{.maker = std::move(maker)}) {
  const base::SignalMask blocked;
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
    state_->is_ending = true;
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
  if (!is_done()) has_timed_out_ = true;
  return is_done();
}

int64_t WorkerPool::unfinished(const PendingBatch& batch) {
  const std::lock_guard lock(state_->mutex);
  const auto& running = state_->running;
  const auto found = std::ranges::find(running, &batch, [](const auto& own) { return own.first; });
  const int64_t job = found != running.end() ? found->second : batch.started;
  return batch.indices[static_cast<size_t>(std::min(job, std::ssize(batch.indices) - 1))];
}

void WorkerPool::clear() {
  const std::lock_guard lock(state_->mutex);
  state_->queue.clear();
}

void WorkerPool::State::work() {
  std::unique_lock lock(mutex);
  while (true) {
    has_work.wait(lock, [this] { return is_ending || !queue.empty(); });
    if (is_ending) return;
    const std::shared_ptr<PendingBatch> batch = queue.front();
    const int64_t job = batch->started++;
    if (batch->started == batch->jobs) queue.pop_front();
    const std::pair<const PendingBatch*, int64_t> own(batch.get(), job);
    const bool is_urgent = waited_for == nullptr || waited_for == batch.get();
    running.push_back(own);
    lock.unlock();
    // If there are more threads than processors, those that make the awaited batch run first.
    if (!is_urgent) std::this_thread::yield();
    std::exception_ptr error = [&] {
      RECORD_USER_SCOPE("load samples");
      return maker->run(*batch, job);
    }();
    lock.lock();
    running.erase(std::ranges::find(running, own));
    if (error) batch->faults.push_back({job, std::move(error)});
    if (++batch->done == batch->jobs) has_finished.notify_all();
  }
}

}  // namespace syncbn::data::detail
