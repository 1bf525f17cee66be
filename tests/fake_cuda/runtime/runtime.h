// What the files of the stand-in for libcudart.so.13 share. Objects that threads of streams use
// are never destroyed: such a thread may outlive static objects at the program's exit.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "fake_cuda.h"

namespace fake_cuda {

/// The number in the environment variable `name`, or `otherwise`.
long setting(const char* name, long otherwise);

// devices.cpp

/// Those that CUDA_VISIBLE_DEVICES leaves of FAKE_CUDA_DEVICES.
int device_count();
bool is_device(int device);
/// The calling thread's.
int current_device();
void set_current_device(int device);

/// Makes `error` what cudaGetLastError() returns in this thread.
cudaError_t fail(cudaError_t error);
/// What the calls that use a device begin with: the error that every call returns after a fork, or
/// after a kernel failed. Creates a context on the current device, if there is none.
cudaError_t ready();
cudaError_t ready_without_context();
/// Loses all devices: a kernel failed.
void lose_devices(const std::string& reason);
bool devices_are_lost();

// memory.cpp

/// The device that owns the memory at `pointer`; empty for host memory.
std::optional<int> owner(const void* pointer);
bool is_pinned(const void* pointer);

// streams.cpp

/// The end of something that a stream does: one cudaEventRecord, or the end of a graph's branch.
class Mark {
 public:
  void set();
  void wait();
  bool is_set() const;
  /// Seconds since some moment, when it was set.
  double time() const;

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool is_set_ = false;
  double time_ = 0;
};
using MarkPtr = std::shared_ptr<Mark>;

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  /// @param waits_for_legacy made without cudaStreamNonBlocking
  Stream(int device, int priority, bool waits_for_legacy);

  /// Appends to the queue. @param blocks as in fake_cuda::enqueue()
  void enqueue(Work work, bool blocks);
  /// Appends work that sets, or waits for, `mark`.
  void set(MarkPtr mark);
  void wait_for(MarkPtr mark);
  /// Blocks until all that was enqueued so far has run.
  void drain();
  bool idle();
  /// The thread ends when the queue is empty.
  void close();

  const int device;
  const int priority;
  const bool waits_for_legacy;

 private:
  void run();
  void run_next(std::unique_lock<std::mutex>& lock);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> queue_;
  uint64_t enqueued_ = 0;
  uint64_t done_ = 0;
  bool busy_ =
      false;  ///< something runs now, on the stream's thread or on the one that enqueued it
  bool has_thread_ = false;
  bool closed_ = false;
  const uint64_t lag_seed_;
};
using StreamPtr = std::shared_ptr<Stream>;

/// The stream of a handle; of the calling thread's device for the default streams' handles. Null
/// for a handle of no stream.
StreamPtr find_stream(cudaStream_t handle);
bool is_default(cudaStream_t handle);
/// Blocks until all streams of `device` are idle.
void drain_device(int device);

// graphs.cpp: capture. Each function is about the capture that a stream takes part in.

class Capture;

/// An event's part in a capture, empty if it was last recorded outside one.
struct CapturedRecord {
  std::weak_ptr<Capture> capture;
  size_t mark = 0;  ///< the number of the mark in the graph
};

bool is_capturing(const Stream& stream);
/// Appends `work` to the graph. Call it only if is_capturing().
cudaError_t capture_work(const Stream& stream, Work work, bool blocks);
cudaError_t capture_record(const Stream& stream, CapturedRecord& record);
/// A stream that waits for a captured event joins its capture.
cudaError_t capture_wait(const StreamPtr& stream, const CapturedRecord& record);
/// For what no capturing stream allows: invalidates the capture.
cudaError_t refuse_capture(const Stream& stream);
/// For calls that are unsafe while anything captures (cudaStreamCaptureModeGlobal).
cudaError_t refuse_while_capturing();
/// For work on a default stream, which would wait for capturing streams.
cudaError_t refuse_legacy_stream();
/// Ends the capture without a graph: the stream is destroyed.
void abandon_capture(const Stream& stream);
void invalidate(const std::weak_ptr<Capture>& capture);

}  // namespace fake_cuda

/// Returns from a function of CUDA's interface unless `call` succeeds.
#define FAKE_CUDA_RETURN_ERROR(call)                                \
  do {                                                              \
    if (const cudaError_t error_ = (call); error_ != cudaSuccess) { \
      return ::fake_cuda::fail(error_);                             \
    }                                                               \
  } while (false)
