#include "transport/polled_work.h"

#include <fmt/format.h>
#include <syncbn/base/signal_mask.h>
#include <unistd.h>

#include <system_error>
#include <thread>

#include "transport/timeouts.h"

namespace syncbn::dist::detail {

bool PollingThreads::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  return running_ > 0;
}

bool PollingThreads::enter() {
  const std::lock_guard lock(mutex_);
  if (closed_) return false;
  ++running_;
  return true;
}

void PollingThreads::leave() {
  const std::lock_guard lock(mutex_);
  --running_;
}

/// Waits for Gloo, in this thread.
void PolledWork::State::wait(std::chrono::milliseconds timeout) {
  std::exception_ptr thrown;
  try {
    inner->wait(timeout);
  } catch (...) {
    thrown = std::current_exception();
  }
  const std::lock_guard lock(mutex);
  is_done = true;
  error = thrown;
  has_ended.notify_all();
}

PolledWork::PolledWork(int rank, c10d::OpType type, c10::intrusive_ptr<c10d::Work> inner,
                       std::chrono::milliseconds timeout, std::shared_ptr<PollingThreads> threads)
    : c10d::Work(rank, type),
      state_(std::make_shared<State>(std::move(inner))),
      timeout_(timeout),
      threads_(std::move(threads)),
      is_transfer_(type == c10d::OpType::SEND || type == c10d::OpType::RECV),
      process_(::getpid()) {}

PolledWork::~PolledWork() {
  // If the buffer were freed, Gloo would stop reading from the peer's connection.
  if (is_transfer_ && ::getpid() == process_) start_thread();
}

/// @return false if the group is closed, or the system cannot start a thread.
bool PolledWork::start_thread() {
  // Polling threads wait until the group is shut down.
  constexpr std::chrono::milliseconds kEndless = std::chrono::hours(24 * 365);
  const std::lock_guard lock(state_->mutex);
  if (state_->is_done || state_->has_thread) return true;
  if (!threads_->enter()) return false;
  try {
    const base::SignalMask blocked;  // which the thread inherits
    std::thread([state = state_, threads = threads_] {
      state->wait(kEndless);
      threads->leave();
    }).detach();
  } catch (const std::system_error&) {
    threads_->leave();
    return false;
  }
  state_->has_thread = true;
  return true;
}

bool PolledWork::isCompleted() {
  start_thread();
  const std::lock_guard lock(state_->mutex);
  return state_->is_done;
}

bool PolledWork::isSuccess() const {
  const std::lock_guard lock(state_->mutex);
  return state_->is_done && !state_->error;
}

std::exception_ptr PolledWork::exception() const {
  const std::lock_guard lock(state_->mutex);
  return state_->error;
}

bool PolledWork::wait(std::chrono::milliseconds timeout) {
  // Gloo's reduce-scatter ignores the timeout of wait().
  if (!is_transfer_ && timeout != kNoTimeout) start_thread();
  std::unique_lock lock(state_->mutex);
  if (!state_->is_done && !state_->has_thread) {
    lock.unlock();
    state_->wait(timeout);
    lock.lock();
  }
  // A reduce-scatter has a timeout of its own, which ends it. A transfer has none.
  const bool endless = timeout == kNoTimeout && !is_transfer_;
  const auto limit = timeout == kNoTimeout ? timeout_ : timeout;
  const auto is_done = [this] { return state_->is_done; };
  if (endless) state_->has_ended.wait(lock, is_done);
  if (!state_->has_ended.wait_for(lock, limit, is_done)) {
    throw TimedOut(fmt::format("timed out after {}ms", limit.count()));
  }
  if (state_->error) std::rethrow_exception(state_->error);
  return true;
}

}  // namespace syncbn::dist::detail
