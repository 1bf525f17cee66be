// Streams and events.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "runtime.h"

namespace fake_cuda {

void Mark::set() {
  const std::lock_guard lock(mutex_);
  is_set_ = true;
  time_ =
      std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  changed_.notify_all();
}

void Mark::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return is_set_; });
}

bool Mark::is_set() const {
  const std::lock_guard lock(mutex_);
  return is_set_;
}

double Mark::time() const {
  const std::lock_guard lock(mutex_);
  return time_;
}

namespace {

/// Random pauses before the work of a stream; the same for the same seed and stream.
class Lag {
 public:
  explicit Lag(uint64_t seed) : random_(seed) {}

  /// Sleeps before one in four pieces of work, on average.
  void pause() {
    constexpr uint64_t kLongest = 400;  // us
    if (random_() % 4 != 0) return;
    std::this_thread::sleep_for(std::chrono::microseconds(random_() % (kLongest + 1)));
  }

 private:
  std::mt19937_64 random_;
};

uint64_t next_lag_seed(int device) {
  static std::atomic<uint64_t> streams{0};
  constexpr uint64_t kSeeds = 1 << 20;
  constexpr uint64_t kStreams = 1 << 10;
  return static_cast<uint64_t>(setting("FAKE_CUDA_SEED", 0)) * kSeeds +
         static_cast<uint64_t>(device) * kStreams + streams++;
}

/// At exit, streams' threads must not run work of libraries that are being destroyed.
std::atomic<bool> exiting{false};

void run_work(const Work& work) {
  if (exiting) return;
  try {
    work();
  } catch (const std::exception& error) {
    lose_devices(error.what());
  }
}

}  // namespace

Stream::Stream(int device, int priority)
    : device(device), priority(priority), lag_seed_(next_lag_seed(device)) {}

void Stream::enqueue(Work work, bool blocks) {
  std::unique_lock lock(mutex_);
  const bool is_idle = enqueued_ == done_;
  queue_.push_back(std::move(work));
  ++enqueued_;
  if (is_idle && !blocks && !lags()) {  // avoids a round trip to the thread
    run_next(lock);
    return;
  }
  if (!has_thread_) {
    has_thread_ = true;
    static const int stops_at_exit = std::atexit([] { exiting = true; });
    static_cast<void>(stops_at_exit);
    std::thread([self = shared_from_this()] { self->run(); }).detach();
  }
  changed_.notify_all();
}

void Stream::set(MarkPtr mark) {
  enqueue([mark = std::move(mark)] { mark->set(); }, /*blocks=*/false);
}

void Stream::wait_for(MarkPtr mark) {
  if (mark->is_set()) return;
  enqueue([mark = std::move(mark)] { mark->wait(); }, /*blocks=*/true);
}

void Stream::run_next(std::unique_lock<std::mutex>& lock) {
  Work work = std::move(queue_.front());
  queue_.pop_front();
  busy_ = true;
  lock.unlock();
  run_work(work);
  work = nullptr;
  lock.lock();
  busy_ = false;
  ++done_;
  changed_.notify_all();
}

void Stream::run() {
  set_current_device(device);
  Lag lag(lag_seed_);
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return !busy_ && (!queue_.empty() || closed_); });
    if (queue_.empty()) return;
    if (lags()) {
      lock.unlock();
      lag.pause();
      lock.lock();
    }
    run_next(lock);
  }
}

void Stream::drain() {
  std::unique_lock lock(mutex_);
  const uint64_t target = enqueued_;
  changed_.wait(lock, [&] { return done_ >= target; });
}

bool Stream::idle() {
  const std::lock_guard lock(mutex_);
  return enqueued_ == done_;
}

void Stream::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

namespace {

bool is_default(cudaStream_t handle) {
  return handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread;
}

/// All existing streams. A handle is the stream's address.
class Streams {
 public:
  Streams() {
    for (int device = 0; device < device_count(); ++device) {
      defaults_.push_back(std::make_shared<Stream>(device, 0));
    }
  }

  cudaStream_t make(int device, int priority) {
    auto stream = std::make_shared<Stream>(device, priority);
    auto* const handle = reinterpret_cast<cudaStream_t>(stream.get());
    const std::lock_guard lock(mutex_);
    streams_.emplace(handle, std::move(stream));
    return handle;
  }

  StreamPtr find(cudaStream_t handle) {
    if (is_default(handle)) return defaults_.at(static_cast<size_t>(current_device()));
    const std::lock_guard lock(mutex_);
    const auto found = streams_.find(handle);
    return found == streams_.end() ? nullptr : found->second;
  }

  StreamPtr remove(cudaStream_t handle) {
    const std::lock_guard lock(mutex_);
    const auto found = streams_.extract(handle);
    return found.empty() ? nullptr : found.mapped();
  }

  std::vector<StreamPtr> all_of(int device) {
    std::vector<StreamPtr> found{defaults_.at(static_cast<size_t>(device))};
    const std::lock_guard lock(mutex_);
    for (const auto& [handle, stream] : streams_) {
      if (stream->device == device) found.push_back(stream);
    }
    return found;
  }

 private:
  std::mutex mutex_;
  std::vector<StreamPtr> defaults_;
  std::unordered_map<cudaStream_t, StreamPtr> streams_;
};

Streams& streams() {
  static auto* const streams = new Streams;
  return *streams;
}

}  // namespace

StreamPtr find_stream(cudaStream_t handle) {
  return streams().find(handle);
}

void drain_device(int device) {
  for (const StreamPtr& stream : streams().all_of(device)) stream->drain();
}

cudaError_t enqueue(cudaStream_t handle, Work work, bool blocks) {
  const StreamPtr stream = find_stream(handle);
  if (!stream) return cudaErrorInvalidResourceHandle;
  stream->enqueue(std::move(work), blocks);
  return cudaSuccess;
}

namespace {

/// The latest cudaEventRecord.
class Event {
 public:
  void record(MarkPtr mark) {
    const std::lock_guard lock(mutex_);
    mark_ = std::move(mark);
  }
  /// Null if it has never been recorded.
  MarkPtr mark() {
    const std::lock_guard lock(mutex_);
    return mark_;
  }

 private:
  std::mutex mutex_;
  MarkPtr mark_;
};

Event& event_of(cudaEvent_t handle) {
  return *reinterpret_cast<Event*>(handle);
}

}  // namespace
}  // namespace fake_cuda

using fake_cuda::Event;
using fake_cuda::event_of;
using fake_cuda::fail;
using fake_cuda::find_stream;
using fake_cuda::streams;

#define FAKE_CUDA_FIND_STREAM(name, handle)              \
  FAKE_CUDA_RETURN_ERROR(fake_cuda::ready());            \
  const fake_cuda::StreamPtr name = find_stream(handle); \
  if (name == nullptr) return fail(cudaErrorInvalidResourceHandle)

extern "C" {

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned /*flags*/, int priority) {
  FAKE_CUDA_RETURN_ERROR(fake_cuda::ready());
  *stream = streams().make(fake_cuda::current_device(), priority);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  if (fake_cuda::is_default(handle)) return fail(cudaErrorInvalidResourceHandle);
  const auto stream = streams().remove(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  stream->close();
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  FAKE_CUDA_FIND_STREAM(stream, handle);
  fake_cuda::count(fake_cuda::Count::kStreamWaits);
  stream->drain();
  FAKE_CUDA_RETURN_ERROR(fake_cuda::ready());
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  FAKE_CUDA_FIND_STREAM(stream, handle);
  return stream->idle() ? cudaSuccess : fail(cudaErrorNotReady);
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  FAKE_CUDA_FIND_STREAM(stream, handle);
  *priority = stream->priority;
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned /*flags*/) {
  FAKE_CUDA_RETURN_ERROR(fake_cuda::ready());
  *event = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  if (event == nullptr) return fail(cudaErrorInvalidResourceHandle);
  delete &event_of(event);
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t handle, unsigned flags) {
  FAKE_CUDA_FIND_STREAM(stream, handle);
  if (flags != cudaEventRecordDefault) return fail(cudaErrorNotSupported);
  auto mark = std::make_shared<fake_cuda::Mark>();
  event_of(event).record(mark);
  stream->set(std::move(mark));
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
  return cudaEventRecordWithFlags(event, handle, cudaEventRecordDefault);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned flags) {
  FAKE_CUDA_FIND_STREAM(stream, handle);
  if (flags != cudaEventWaitDefault) return fail(cudaErrorNotSupported);
  const fake_cuda::MarkPtr mark = event_of(event).mark();
  if (mark != nullptr) stream->wait_for(mark);
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  while (fake_cuda::setting("FAKE_CUDA_QUERY_HANGS", 0) == 1) ::pause();
  FAKE_CUDA_RETURN_ERROR(fake_cuda::ready());
  const fake_cuda::MarkPtr mark = event_of(event).mark();
  return mark == nullptr || mark->is_set() ? cudaSuccess : fail(cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  FAKE_CUDA_RETURN_ERROR(fake_cuda::ready());
  fake_cuda::count(fake_cuda::Count::kEventWaits);
  if (const fake_cuda::MarkPtr mark = event_of(event).mark()) mark->wait();
  FAKE_CUDA_RETURN_ERROR(fake_cuda::ready());
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  const auto from = event_of(start).mark();
  const auto to = event_of(end).mark();
  if (from == nullptr || to == nullptr) return fail(cudaErrorInvalidResourceHandle);
  if (!from->is_set() || !to->is_set()) return fail(cudaErrorNotReady);
  constexpr double kMillisecond = 1e-3;
  *milliseconds = static_cast<float>((to->time() - from->time()) / kMillisecond);
  return cudaSuccess;
}

// Nothing captures: graphs have no stand-in.

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t /*stream*/, cudaStreamCaptureStatus* status,
                                     unsigned long long* /*id*/, cudaGraph_t* /*graph*/,
                                     const cudaGraphNode_t** /*dependencies*/,
                                     const cudaGraphEdgeData** /*edges*/, size_t* /*count*/) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t /*stream*/, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* /*mode*/) {
  return cudaSuccess;
}

}  // extern "C"
