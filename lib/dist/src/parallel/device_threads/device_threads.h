#pragma once

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace syncbn::dist::detail {

/// A thread for each device, which waits between calls of run().
class DeviceThreads {
 public:
  /// @param prepare called first by each thread; returned from before the constructor is
  /// @throws base::UnavailableError if a thread cannot be started
  DeviceThreads(int count, const std::function<void()>& prepare);
  ~DeviceThreads();
  DeviceThreads(const DeviceThreads&) = delete;
  DeviceThreads& operator=(const DeviceThreads&) = delete;

  /// Calls work(i) on thread i, for the first `count` threads, and waits for them. `work` must not
  /// throw.
  /// @throws base::UserError while another run() is going on, and in a forked process, where there
  ///   are no threads
  void run(int count, const std::function<void(int)>& work);

 private:
  void end();
  void loop(int index, const std::function<void()>& prepare);

  const pid_t process_ = ::getpid();
  std::atomic<bool> is_running_ = false;
  std::mutex mutex_;
  std::condition_variable changed_;
  const std::function<void(int)>* work_ = nullptr;  ///< null: the threads are to end
  int count_ = 0;
  int busy_ = 0;
  uint64_t runs_ = 0;
  std::vector<std::thread> threads_;  ///< last, since threads use the other members
};

}  // namespace syncbn::dist::detail
