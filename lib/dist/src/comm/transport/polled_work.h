#pragma once

#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

namespace syncbn::dist::detail {

/// The threads that wait for the PolledWorks of one group. Thread-safe.
class PollingThreads {
 public:
  /// Forbids new threads. @return whether some still wait; aborting the transport ends them.
  bool close();

 private:
  friend class PolledWork;
  bool enter();
  void leave();

  std::mutex mutex_;
  int running_ = 0;
  bool closed_ = false;
};

/// A send, recv or reduce-scatter of Gloo. Gloo's own work completes only inside wait(), and its
/// destructor frees the buffer even while the connection still uses it. This work starts a thread
/// that waits for Gloo when it is polled, and when it is dropped before it has completed.
class PolledWork : public c10d::Work {
 public:
  /// @param timeout bounds a wait() without a timeout for a send or recv that a thread already
  ///   waits for: unlike a reduce-scatter, these have no timeout of their own.
  PolledWork(int rank, c10d::OpType type, c10::intrusive_ptr<c10d::Work> inner,
             std::chrono::milliseconds timeout, std::shared_ptr<PollingThreads> threads);
  ~PolledWork() override;

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override { return state_->inner->sourceRank(); }
  std::vector<at::Tensor> result() override { return state_->inner->result(); }
  void synchronize() override {}
  void abort() override { state_->inner->abort(); }
  bool wait(std::chrono::milliseconds timeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return state_->inner->getFuture();
  }

 private:
  struct State {
    explicit State(c10::intrusive_ptr<c10d::Work> inner) : inner(std::move(inner)) {}

    const c10::intrusive_ptr<c10d::Work> inner;
    std::mutex mutex;
    std::condition_variable has_ended;
    bool is_done = false;
    bool has_thread = false;
    std::exception_ptr error;

    void wait(std::chrono::milliseconds timeout);
  };

  bool start_thread();

  const std::shared_ptr<State> state_;
  const std::chrono::milliseconds timeout_;
  const std::shared_ptr<PollingThreads> threads_;
  const bool is_transfer_;
  const pid_t process_;
};

}  // namespace syncbn::dist::detail
