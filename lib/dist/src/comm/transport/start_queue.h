#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace syncbn::dist::detail {

/// Starts collectives of one group on a thread of its own, in the order in which they were called.
/// For asynchronous calls that consist of several collectives, where each needs the result of the
/// one before, and for the asynchronous calls after them.
class StartQueue : public std::enable_shared_from_this<StartQueue> {
 public:
  using Task = std::function<void()>;

  /// Cheap. Thread-safe, as all functions.
  bool is_idle() const { return pending_ == 0; }

  /// @param task must not throw. It may wait for the collectives that it starts. It runs on the
  ///   caller's GPU and streams.
  void push(Task task);

  /// Waits until all tasks have run. Returns at once on the queue's own thread.
  void drain();

  /// Runs the tasks that are left, and ends the thread. The owner makes collectives fail first, so
  /// that tasks end soon.
  void stop();

 private:
  void run();

  std::atomic<int> pending_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool stop_ = false;
  std::thread thread_;
  pid_t process_ = ::getpid();
};

}  // namespace syncbn::dist::detail
