#pragma once

#include <memory>
#include <string>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "monitor/flight_recorder.h"
#include "monitor/peer_monitor.h"

namespace syncbn::dist::detail {

/// Which call it was, to be told when it fails.
struct Label {
  Call call;
  int rank;  ///< in the world
  int world_size;
  std::shared_ptr<FlightRecorder> log;
  std::weak_ptr<PeerMonitor> monitor;

  /// Of the exception being handled. While it was under way: the network, or a peer.
  /// @throws base::UnavailableError; base::UserError when the ranks called different things.
  [[noreturn]] void rethrow() const;

  /// The same before it began: its arguments. @throws base::UserError.
  [[noreturn]] void rethrow_refusal() const;

 private:
  std::string subject() const;
};

/// A call under way: the library's own work, with its errors named.
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
