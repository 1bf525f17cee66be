#include "device_threads/device_threads.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace syncbn::dist::detail {

/// The state that the threads share with run().
struct DeviceThreads::Shared {
  std::mutex mutex;
  std::condition_variable changed;
  const std::function<void(int)>* work = nullptr;  ///< null: the threads are to end
  int count = 0;
  int busy = 0;
  uint64_t runs = 0;
  std::vector<std::thread> threads;
};

DeviceThreads::DeviceThreads(const char* owner, int count, const std::function<void()>& prepare)
    : owner_(owner), shared_(std::make_unique<Shared>()) {
  Shared& shared = *shared_;
  shared.busy = count;
  try {
    for (int i = 0; i < count; ++i) {
      shared.threads.emplace_back([i, prepare, &shared] { loop(shared, i, prepare); });
    }
  } catch (const std::system_error& error) {
    end();
    throw base::UnavailableError(fmt::format("{}: cannot start a thread for each device: {}", owner,
                                             base::describe_errno(error.code().value())));
  }
  std::unique_lock lock(shared.mutex);
  shared.changed.wait(lock, [&] { return shared.busy == 0; });
}

DeviceThreads::~DeviceThreads() {
  end();
}

void DeviceThreads::end() {
  if (::getpid() != process_) {
    // A forked process: it does not have the threads, which pthread_cond_destroy() would wait for.
    static_cast<void>(shared_.release());
    return;
  }
  Shared& shared = *shared_;
  {
    const std::lock_guard lock(shared.mutex);
    shared.work = nullptr;
    shared.count = static_cast<int>(shared.threads.size());
    ++shared.runs;
  }
  shared.changed.notify_all();
  for (std::thread& thread : shared.threads) thread.join();
}

DeviceThreads::Claim DeviceThreads::claim() {
  if (::getpid() != process_) {
    throw base::UserError(fmt::format(
        "{}: its threads are in process {}, and this process, {}, was forked from it; fork before "
        "you construct it",
        owner_, process_, ::getpid()));
  }
  if (is_claimed_.exchange(true)) {
    throw base::UserError(
        fmt::format("{} was called by two threads at once, or from inside itself; make one wrapper "
                    "per thread",
                    owner_));
  }
  return Claim(is_claimed_);
}

void DeviceThreads::run(int count, const std::function<void(int)>& work) {
  Shared& shared = *shared_;
  std::unique_lock lock(shared.mutex);
  shared.work = &work;
  shared.count = count;
  shared.busy = count;
  ++shared.runs;
  shared.changed.notify_all();
  shared.changed.wait(lock, [&] { return shared.busy == 0; });
}

void DeviceThreads::loop(Shared& shared, int index, const std::function<void()>& prepare) {
  prepare();
  std::unique_lock lock(shared.mutex);
  uint64_t done = 0;
  for (;;) {
    if (--shared.busy == 0) shared.changed.notify_all();
    // A thread whose index is not below `count` skips the run.
    do {
      shared.changed.wait(lock, [&] { return shared.runs != done; });
      done = shared.runs;
    } while (index >= shared.count);
    if (shared.work == nullptr) return;
    const std::function<void(int)>& work = *shared.work;
    lock.unlock();
    work(index);
    lock.lock();
  }
}

}  // namespace syncbn::dist::detail
