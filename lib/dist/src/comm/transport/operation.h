#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "transport/segment.h"

namespace syncbn::dist::detail::shm {

/// One step of an operation: the shared memory of all ranks, and the call that the step belongs to.
struct Step {
  int64_t number;  ///< within the operation, from 0
  uint64_t tag;
  std::chrono::steady_clock::time_point deadline;
  const std::vector<Segment>& segments;
  const Layout& layout;
  int rank;
  size_t slot;

  int ranks() const { return static_cast<int>(segments.size()); }
  /// What a rank publishes in this step.
  std::byte* input(int of) const { return at(of, layout.input_at(slot)); }
  /// What a rank has computed in the step before.
  const std::byte* result(int of) const { return at(of, layout.result_at(slot)); }
  /// What this rank computes now, to be read by all in the next step.
  std::byte* next_result() const { return at(rank, layout.result_at((slot + 1) % kSlots)); }

 private:
  std::byte* at(int of, size_t offset) const {
    return segments[static_cast<size_t>(of)].at(offset);
  }
};

/// A collective as steps that all ranks of a host take together: in each, a rank publishes data in
/// its slot, and consumes the others' slots once all have published.
class Operation {
 public:
  virtual ~Operation() = default;

  virtual int64_t steps() const { return 1; }
  /// Whether publish() may wait, until the operation's deadline.
  virtual bool blocks() const { return false; }
  virtual void publish(const Step& step) = 0;
  virtual void consume(const Step& step) = 0;
  /// After the last step.
  virtual void finish() {}
  virtual std::vector<at::Tensor> result() const = 0;
};

}  // namespace syncbn::dist::detail::shm
