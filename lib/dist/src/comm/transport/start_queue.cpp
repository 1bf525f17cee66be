#include "transport/start_queue.h"

#include <syncbn/base/signal_mask.h>

#include <utility>
#include <vector>

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace syncbn::dist::detail {
namespace {

/// The task, set to run on the calling thread's GPU and streams, which are per thread.
StartQueue::Task on_current_streams(StartQueue::Task task) {
  if (!c10::impl::hasDeviceGuardImpl(at::kCUDA)) return task;
  const c10::impl::VirtualGuardImpl cuda(at::kCUDA);
  std::vector<c10::Stream> streams;
  for (c10::DeviceIndex i = 0; i < cuda.deviceCount(); ++i) {
    streams.push_back(cuda.getStream({at::kCUDA, i}));
  }
  if (streams.empty()) return task;
  return [task = std::move(task), streams = std::move(streams), device = cuda.getDevice()] {
    const c10::MultiStreamGuard on_streams(streams);
    const c10::DeviceGuard on_device(device);
    task();
  };
}

}  // namespace

void StartQueue::push(Task task) {
  const std::lock_guard lock(mutex_);
  if (!thread_.joinable()) {
    const base::SignalMask blocked;  // which the thread inherits
    thread_ = std::thread([self = shared_from_this()] { self->run(); });
  }
  tasks_.push_back(on_current_streams(std::move(task)));
  ++pending_;
  changed_.notify_all();
}

void StartQueue::drain() {
  if (is_idle()) return;
  std::unique_lock lock(mutex_);
  if (std::this_thread::get_id() == thread_.get_id()) return;
  changed_.wait(lock, [this] { return pending_ == 0; });
}

void StartQueue::stop() {
  // A forked child does not have this thread, and one of its parent may have held the mutex.
  if (::getpid() != process_) {
    if (thread_.joinable()) thread_.detach();
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    changed_.notify_all();
    if (!thread_.joinable()) return;
  }
  // If a task held the last reference to the group, this is the queue's own thread.
  thread_.get_id() == std::this_thread::get_id() ? thread_.detach() : thread_.join();
}

void StartQueue::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stop_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
    task = nullptr;
    lock.lock();
    --pending_;
    changed_.notify_all();
  }
}

}  // namespace syncbn::dist::detail
