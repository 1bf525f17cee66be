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

/// Starts collectives of one group on a separate thread, in the order in which they were called.
/// For asynchronous calls that consist of several collectives, each of which needs the result of
/// the previous one, and for the asynchronous calls after them.
class StartQueue : public std::enable_shared_from_this<StartQueue> {
 public:
  using Task = std::function<void()>;

  /// Only reads an atomic. All functions are thread-safe.
  bool is_idle() const { return pending_ == 0; }

  /// @param task must not throw. May wait for the collectives that it starts. Runs on the caller's
  ///   GPU and streams.
  void push(Task task);

  /// Waits until all tasks have run. Returns at once on the queue's own thread.
  void drain();

  /// Runs the remaining tasks, and ends the thread. The owner first makes collectives fail, so that
  /// the tasks end soon.
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
