#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/SmallVector.h>

#include "transport/segment.h"

namespace syncbn::dist::detail::shm {

inline int64_t bytes_of(const at::Tensor& tensor) {
  return static_cast<int64_t>(tensor.nbytes());
}

inline void copy_bytes(std::byte* to, const std::byte* from, int64_t bytes) {
  if (to != from && bytes > 0) std::memmove(to, from, static_cast<size_t>(bytes));
}

/// The values of a tensor, contiguous: the tensor itself, or a copy.
class Dense {
 public:
  explicit Dense(const at::Tensor& tensor) : tensor_(tensor), values_(tensor.contiguous()) {}

  std::byte* data() const { return static_cast<std::byte*>(values_.data_ptr()); }
  int64_t bytes() const { return bytes_of(values_); }
  int64_t element_size() const { return static_cast<int64_t>(values_.element_size()); }
  at::Tensor flat() const { return values_.detach().view(-1); }
  const at::Tensor& tensor() const { return tensor_; }

  void write_back() const {
    if (values_.is_same(tensor_)) return;
    const at::NoGradGuard no_grad;
    tensor_.detach().copy_(values_);
  }

 private:
  at::Tensor tensor_;
  at::Tensor values_;
};

/// The part of a tensor that goes through a slot in one step.
struct Chunk {
  int64_t begin, bytes;
};

/// Divides `bytes` into chunks that fit into a slot; at least one, which may be empty.
class Chunks {
 public:
  Chunks(int64_t bytes, const Layout& layout)
      : bytes_(bytes), chunk_bytes_(static_cast<int64_t>(layout.input_bytes())) {}

  int64_t count() const { return std::max<int64_t>(1, (bytes_ + chunk_bytes_ - 1) / chunk_bytes_); }
  Chunk at(int64_t index) const {
    const int64_t begin = index * chunk_bytes_;
    return {begin, std::min(chunk_bytes_, bytes_ - begin)};
  }

 private:
  int64_t bytes_;
  int64_t chunk_bytes_;
};

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
  /// What a rank computed in the previous step.
  const std::byte* result(int of) const { return at(of, layout.result_at(slot)); }
  /// Where this rank stores what all ranks read in the next step.
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
  explicit Operation(at::TensorList outputs) {
    for (const at::Tensor& output : outputs) outputs_.emplace_back(output);
  }
  virtual ~Operation() = default;

  virtual int64_t steps() const { return 1; }
  /// Whether publish() may wait, until the operation's deadline.
  virtual bool blocks() const { return false; }
  virtual void publish(const Step& step) = 0;
  virtual void consume(const Step& step) = 0;
  /// Called after the last step.
  virtual void finish() {
    for (const Dense& output : outputs_) output.write_back();
  }
  std::vector<at::Tensor> result() const {
    std::vector<at::Tensor> tensors;
    for (const Dense& output : outputs_) tensors.push_back(output.tensor());
    return tensors;
  }

 protected:
  /// The output of an operation that has one.
  const Dense& values() const { return outputs_[0]; }

  c10::SmallVector<Dense, 1> outputs_;
};

}  // namespace syncbn::dist::detail::shm
