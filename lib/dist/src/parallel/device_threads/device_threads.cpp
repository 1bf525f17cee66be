#include "device_threads/device_threads.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>

#include <system_error>

namespace syncbn::dist::detail {

DeviceThreads::DeviceThreads(int count, const std::function<void()>& prepare) : busy_(count) {
  try {
    for (int i = 0; i < count; ++i) threads_.emplace_back([=, this] { loop(i, prepare); });
  } catch (const std::system_error& error) {
    end();
    throw base::UnavailableError(fmt::format("cannot start a thread for each device: {}",
                                             base::describe_errno(error.code().value())));
  }
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return busy_ == 0; });
}

DeviceThreads::~DeviceThreads() {
  end();
}

void DeviceThreads::end() {
  if (::getpid() != process_) {
    for (std::thread& thread : threads_) thread.detach();
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    work_ = nullptr;
    count_ = static_cast<int>(threads_.size());
    ++runs_;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void DeviceThreads::run(int count, const std::function<void(int)>& work) {
  if (::getpid() != process_) {
    throw base::UserError(fmt::format(
        "the threads of a wrapper of several devices are in process {}, and this one, {}, was "
        "forked from it; wrap the module after a fork",
        process_, ::getpid()));
  }
  if (is_running_.exchange(true)) {
    throw base::UserError(
        "a wrapper of several devices was called by two threads at once, or inside itself");
  }
  std::unique_lock lock(mutex_);
  work_ = &work;
  count_ = count;
  busy_ = count;
  ++runs_;
  changed_.notify_all();
  changed_.wait(lock, [&] { return busy_ == 0; });
  is_running_ = false;
}

void DeviceThreads::loop(int index, const std::function<void()>& prepare) {
  prepare();
  std::unique_lock lock(mutex_);
  uint64_t done = 0;
  for (;;) {
    if (--busy_ == 0) changed_.notify_all();
    // A thread that is not asked in a run skips it.
    do {
      changed_.wait(lock, [&] { return runs_ != done; });
      done = runs_;
    } while (index >= count_);
    if (work_ == nullptr) return;
    const std::function<void(int)>& work = *work_;
    lock.unlock();
    work(index);
    lock.lock();
  }
}

}  // namespace syncbn::dist::detail
