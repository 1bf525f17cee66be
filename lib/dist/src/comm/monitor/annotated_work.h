#pragma once

#include <memory>
#include <string>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "monitor/flight_recorder.h"
#include "monitor/peer_monitor.h"

namespace syncbn::dist::detail {

/// A call as errors describe it.
struct Label {
  Call call;
  int rank;  ///< in the world
  int world_size;
  std::shared_ptr<FlightRecorder> log;
  std::weak_ptr<PeerMonitor> monitor;

  /// For an exception being handled that ended the call: adds the call and the cause.
  /// @throws base::UnavailableError, or base::UserError if the ranks made different calls.
  [[noreturn]] void rethrow() const;

  /// For an exception being handled about the call's arguments. @throws base::UserError.
  [[noreturn]] void rethrow_refusal() const;

 private:
  std::string subject() const;
};

/// Adds the call and the cause to the errors of another work.
class AnnotatedWork : public c10d::Work {
 public:
  AnnotatedWork(Label label, c10::intrusive_ptr<c10d::Work> inner, bool by_gloo);

  bool isCompleted() override { return inner_->isCompleted(); }
  bool isSuccess() const override { return inner_->isSuccess(); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  std::vector<at::Tensor> result() override { return inner_->result(); }
  void synchronize() override { inner_->synchronize(); }
  void abort() override { inner_->abort(); }
  float getDuration() const override { return inner_->getDuration(); }
  uint64_t getSequencenumber() const override { return label_.call.sequence; }

  bool wait(std::chrono::milliseconds timeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  const Label label_;
  const c10::intrusive_ptr<c10d::Work> inner_;
  const bool by_gloo_;
};

}  // namespace syncbn::dist::detail
