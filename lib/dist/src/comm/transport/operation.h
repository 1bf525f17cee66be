#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "transport/segment.h"

namespace syncbn::dist::detail::shm {

/// The shared memory of all ranks, as it is to be used in one step.
class Slots {
 public:
  Slots(const std::vector<Segment>& segments, const Layout& layout, int rank, uint32_t step)
      : segments_(segments), layout_(layout), rank_(rank), slot_(step % kSlots) {}

  int rank() const { return rank_; }
  int ranks() const { return static_cast<int>(segments_.size()); }
  const Layout& layout() const { return layout_; }

  /// What a rank gives in this step.
  std::byte* input(int rank) const { return at(rank, layout_.input_at(slot_)); }
  /// What a rank has worked out in the step before.
  const std::byte* result(int rank) const { return at(rank, layout_.result_at(slot_)); }
  /// What this rank works out now, for all to see in the next step.
  std::byte* next_result() const { return at(rank_, layout_.result_at((slot_ + 1) % kSlots)); }

 private:
  std::byte* at(int rank, size_t offset) const {
    return segments_[static_cast<size_t>(rank)].at(offset);
  }

  const std::vector<Segment>& segments_;
  const Layout& layout_;
  const int rank_;
  const size_t slot_;
};

/// A collective as steps that all ranks take together: in each a rank first puts something into its
/// slot, and takes from the others' slots once all have done so.
class Operation {
 public:
  virtual ~Operation() = default;

  virtual int64_t steps() const { return 1; }
  /// Whether put() may wait, until the operation's own deadline.
  virtual bool blocks() const { return false; }
  virtual void put(int64_t step, const Slots& slots) = 0;
  virtual void take(int64_t step, const Slots& slots) = 0;
  /// After the last step.
  virtual void finish() {}
  virtual std::vector<at::Tensor> result() const = 0;
};

}  // namespace syncbn::dist::detail::shm
