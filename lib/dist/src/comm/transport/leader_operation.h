#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "transport/gloo.h"
#include "transport/operation.h"
#include "transport/timeouts.h"

namespace syncbn::dist::detail::shm {

/// The leader of a host consumes the chunks of its ranks, computes the outcome (with the leaders of
/// other hosts, if any) and publishes it in chunks.
class LeaderOperation : public Operation {
 public:
  /// @param leaders connects the leaders; null on other ranks, and if there is one host.
  LeaderOperation(std::shared_ptr<Gloo> leaders, const Layout& layout, at::TensorList outputs,
                  int64_t bytes_up, int64_t bytes_down)
      : Operation(outputs),
        leaders_(std::move(leaders)),
        up_(bytes_up, layout),
        down_(bytes_down, layout) {}

  int64_t steps() const override { return up_.count() + down_.count(); }
  bool blocks() const override { return leaders_ != nullptr; }

  void publish(const Step& step) override {
    if (step.number < up_.count()) return publish_up(up_.at(step.number), step);
    if (step.rank != kLeader) return;
    if (step.number == up_.count()) {
      compute_outcome(step.tag, time_left(step.deadline));
    }
    const Chunk part = down_.at(step.number - up_.count());
    copy_bytes(step.input(kLeader), outcome() + part.begin, part.bytes);
  }

  void consume(const Step& step) override {
    if (step.number < up_.count()) {
      if (step.rank == kLeader) consume_up(up_.at(step.number), step);
    } else if (step.rank != kLeader) {
      const Chunk part = down_.at(step.number - up_.count());
      copy_bytes(outcome() + part.begin, step.input(kLeader), part.bytes);
    }
  }

 protected:
  static constexpr int kLeader = 0;  ///< among the ranks of a host

  const std::shared_ptr<Gloo> leaders_;

 private:
  virtual void publish_up(const Chunk& /*chunk*/, const Step& /*step*/) {}
  /// On the leader: consumes the chunks of its host's ranks.
  virtual void consume_up(const Chunk& /*chunk*/, const Step& /*step*/) {}
  virtual void compute_outcome(uint64_t tag, std::chrono::milliseconds timeout) = 0;
  /// What the leader publishes and the other ranks of its host receive.
  virtual std::byte* outcome() { return outputs_.empty() ? nullptr : values().data(); }

  const Chunks up_;
  const Chunks down_;
};

}  // namespace syncbn::dist::detail::shm
