#pragma once

#include <exception>
#include <functional>
#include <thread>

namespace syncbn::train {

/// Writes files while training goes on, one job after the other. Not thread-safe.
class CheckpointWriter {
 public:
  CheckpointWriter() = default;
  /// Waits for the job, and drops its error.
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  /// Starts `job` on a thread of its own after the one before.
  /// @throws what that one threw.
  void start(std::function<void()> job);

  /// Waits for the last job. @throws what it threw.
  void wait();

 private:
  std::thread thread_;
  std::exception_ptr error_;
};

}  // namespace syncbn::train
