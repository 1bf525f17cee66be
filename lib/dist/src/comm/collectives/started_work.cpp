#include "collectives/started_work.h"

#include <fmt/format.h>
#include <syncbn/dist/peer_error.h>

#include <algorithm>
#include <utility>

#include "transport/timeouts.h"

namespace syncbn::dist::detail {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

void complete(const Started& started, Timeout limit, Outcome& outcome) {
  Timeout timeout = limit;
  if (started.timeout) {
    const milliseconds left = time_left(started.since + *started.timeout);
    timeout = limit ? std::min(*limit, left) : left;
  }
  if (started.work) started.work->wait(timeout.value_or(kNoTimeout));
  if (started.finish) started.finish(outcome);
}

void StartedWork::start(Started started) {
  const std::lock_guard lock(mutex_);
  started_ = std::move(started);
  has_started_ = true;
  has_started_now_.notify_all();
}

void StartedWork::fail(std::exception_ptr error) {
  start({.work = {},
         .finish = [error = std::move(error)](Outcome&) { std::rethrow_exception(error); }});
}

bool StartedWork::has_started() {
  const std::lock_guard lock(mutex_);
  return has_started_;
}

void StartedWork::wait(Timeout timeout) {
  timeout = checked(timeout, "Work::wait: the timeout");
  if (!is_done_) {
    try {
      const auto begin = Clock::now();
      std::unique_lock lock(mutex_);
      const auto is_started = [this] { return has_started_; };
      if (!timeout) {
        has_started_now_.wait(lock, is_started);
      } else if (!has_started_now_.wait_for(lock, *timeout, is_started)) {
        throw PeerError(fmt::format(
            "{} has not started after {} ms: the group's collectives before it are not complete",
            call_, timeout->count()));
      }
      lock.unlock();
      if (timeout) timeout = time_left(begin + *timeout);
      complete(started_, timeout, outcome_);
    } catch (...) {
      error_ = std::current_exception();
    }
    is_done_ = true;
    if (has_started()) started_ = {};  // the buffers
  }
  if (error_) std::rethrow_exception(error_);
}

bool StartedWork::is_completed() {
  return is_done_ || (has_started() && (!started_.work || started_.work->isCompleted()));
}

std::exception_ptr StartedWork::exception() {
  if (!is_completed()) return nullptr;
  try {
    wait(std::nullopt);
  } catch (...) {  // kept in error_
  }
  return error_;
}

const std::vector<at::Tensor>& StartedWork::tensors() {
  wait(std::nullopt);
  return outcome_.tensors;
}

const std::vector<std::string>& StartedWork::bytes() {
  wait(std::nullopt);
  return outcome_.bytes;
}

}  // namespace syncbn::dist::detail
