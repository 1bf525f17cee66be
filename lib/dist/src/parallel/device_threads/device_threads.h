#pragma once

#include <unistd.h>

#include <atomic>
#include <functional>
#include <memory>

namespace syncbn::dist::detail {

/// One thread per device. Threads sleep between calls of run().
class DeviceThreads {
 public:
  /// Hold one while you use the threads.
  class Claim {
   public:
    explicit Claim(std::atomic<bool>& is_held) : is_held_(is_held) {}
    ~Claim() { is_held_ = false; }
    Claim(const Claim&) = delete;
    Claim& operator=(const Claim&) = delete;

   private:
    std::atomic<bool>& is_held_;
  };

  /// @param owner the wrapper's name in messages
  /// @param prepare each thread calls it once; the constructor waits for all of these calls
  /// @throws base::UnavailableError if a thread cannot be started
  DeviceThreads(const char* owner, int count, const std::function<void()>& prepare);
  ~DeviceThreads();
  DeviceThreads(const DeviceThreads&) = delete;
  DeviceThreads& operator=(const DeviceThreads&) = delete;

  /// @throws base::UserError while a caller holds another claim, or in a forked process, which does
  ///   not have the threads
  [[nodiscard]] Claim claim();

  /// Calls work(i) on thread i, for the first `count` threads, and waits for them. `work` must not
  /// throw. The caller holds a claim.
  void run(int count, const std::function<void(int)>& work);

 private:
  struct Shared;
  void end();
  static void loop(Shared& shared, int index, const std::function<void()>& prepare);

  const char* const owner_;
  const pid_t process_ = ::getpid();
  std::atomic<bool> is_claimed_ = false;
  std::unique_ptr<Shared> shared_;
};

}  // namespace syncbn::dist::detail
