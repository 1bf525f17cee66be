#include "monitor/completion_queries.h"

#include <syncbn/base/signal_mask.h>

#include <thread>
#include <utility>

namespace syncbn::dist::detail {

CompletionQueries::~CompletionQueries() {
  const std::lock_guard lock(state_->mutex);
  state_->stop = true;
  state_->changed.notify_all();
}

void CompletionQueries::update(Logs logs, std::chrono::milliseconds limit) {
  if (logs.empty()) return;
  const auto deadline = std::chrono::steady_clock::now() + limit;
  const auto is_idle = [this] { return !state_->is_busy; };
  std::unique_lock lock(state_->mutex);
  if (!state_->changed.wait_until(lock, deadline, is_idle)) return;
  state_->logs = std::move(logs);
  state_->is_busy = true;
  if (!std::exchange(has_thread_, true)) {
    const base::SignalMask blocked;  // which the thread inherits
    std::thread(run, state_).detach();
  }
  state_->changed.notify_all();
  state_->changed.wait_until(lock, deadline, is_idle);
}

void CompletionQueries::run(const std::shared_ptr<State>& state) {
  std::unique_lock lock(state->mutex);
  for (;;) {
    state->changed.wait(lock, [&] { return state->stop || state->is_busy; });
    if (state->stop) return;
    Logs logs = std::move(state->logs);
    lock.unlock();
    for (const auto& log : logs) log->update();
    logs.clear();
    lock.lock();
    state->is_busy = false;
    state->changed.notify_all();
  }
}

}  // namespace syncbn::dist::detail
