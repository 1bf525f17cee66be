// Shared by the files of the stand-in for libcudart.so.13. Objects that streams' threads use are
// never destroyed: such a thread may outlive static objects when the program exits.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>

#include "fake_cuda.h"

namespace fake_cuda {

/// The number in the environment variable `name`, or `otherwise`.
long setting(const char* name, long otherwise);

// devices.cpp

/// The devices of FAKE_CUDA_DEVICES that CUDA_VISIBLE_DEVICES selects.
int device_count();
bool is_device(int device);
/// The device of the calling thread.
int current_device();
void set_current_device(int device);

/// Makes `error` what cudaGetLastError() returns in this thread.
cudaError_t fail(cudaError_t error);
/// Every call that uses a device begins with this: it returns the error that all calls return after
/// a fork or after a kernel failed. Creates a context on the current device if there is none.
cudaError_t ready();
cudaError_t ready_without_context();
/// Makes all devices unusable after a kernel failed.
void lose_devices(const std::string& reason);
bool devices_are_lost();

// streams.cpp

/// What a stream sets at a cudaEventRecord.
class Mark {
 public:
  void set();
  void wait();
  bool is_set() const;
  /// When it was set, in seconds since a fixed moment.
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
  Stream(int device, int priority);

  /// Appends to the queue. @param blocks as in fake_cuda::enqueue()
  void enqueue(Work work, bool blocks);
  /// These append work that sets `mark`, or waits for it.
  void set(MarkPtr mark);
  void wait_for(MarkPtr mark);
  /// Blocks until all work that was enqueued so far has run.
  void drain();
  bool idle();
  /// The thread ends when the queue is empty.
  void close();

  const int device;
  const int priority;

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

/// The stream of a handle; for a default stream's handle, that of the calling thread's device. Null
/// if there is no such stream.
StreamPtr find_stream(cudaStream_t handle);
/// Blocks until all streams of `device` are idle.
void drain_device(int device);

}  // namespace fake_cuda

/// Returns an error of `call` from a function of CUDA's interface.
#define FAKE_CUDA_RETURN_ERROR(call)                                \
  do {                                                              \
    if (const cudaError_t error_ = (call); error_ != cudaSuccess) { \
      return ::fake_cuda::fail(error_);                             \
    }                                                               \
  } while (false)
