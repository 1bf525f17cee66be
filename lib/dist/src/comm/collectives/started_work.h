#pragma once

#include <syncbn/dist/collectives.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

namespace syncbn::dist::detail {

/// What a collective returns, besides the tensors that it overwrites.
struct Outcome {
  std::vector<at::Tensor> tensors;
  std::vector<std::string> bytes;
};

/// A call that has been started.
struct Started {
  c10::intrusive_ptr<c10d::Work> work = {};   ///< null: nothing to wait for
  std::function<void(Outcome&)> finish = {};  ///< called after the work succeeded; may be empty
  Timeout timeout = std::nullopt;             ///< for a work that has none of its own
  std::chrono::steady_clock::time_point since = {};  ///< start of the timeout
};

/// Waits for a call, and finishes it. @param limit of this wait, in addition to the call's timeout.
void complete(const Started& started, Timeout limit, Outcome& outcome);

/// The Work of an asynchronous call.
class StartedWork : public Work {
 public:
  /// @param call describes the call in errors: "all_reduce on rank 0 of 2 of group '0'".
  explicit StartedWork(std::string call) : call_(std::move(call)) {}

  /// Reports that the call has started, or failed to. Called once, from any thread.
  void start(Started started);
  void fail(std::exception_ptr error);

  void wait(Timeout timeout) override;
  bool is_completed() override;
  std::exception_ptr exception() override;
  const std::vector<at::Tensor>& tensors() override;
  const std::vector<std::string>& bytes() override;

 private:
  bool has_started();

  const std::string call_;
  std::mutex mutex_;
  std::condition_variable has_started_now_;
  bool has_started_ = false;
  Started started_;

  // Only the thread that waits uses these.
  bool is_done_ = false;
  std::exception_ptr error_;
  Outcome outcome_;
};

}  // namespace syncbn::dist::detail
