#pragma once

#include <chrono>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "transport/transport.h"

namespace syncbn::dist::detail {

/// Merges a row of each rank by recursive doubling: ceil(log2 of the ranks) hops, for any number of
/// ranks. A node of the tree is a range of ranks, and its children are the halves of the range;
/// every rank of a node gets the merged row of the node. The tree depends only on the number of
/// ranks, so the result has the same bits in whatever order the ranks arrive.
class RowTree {
 public:
  /// @param tag of the sends and recvs. @param timeout of the whole merge.
  RowTree(c10d::Backend& backend, int tag, MergeRows merge, std::chrono::milliseconds timeout)
      : backend_(backend), tag_(tag), merge_(merge), deadline_(Clock::now() + timeout) {}

  /// @param row [1, n], contiguous. @return the merged row of all ranks.
  at::Tensor merged(const at::Tensor& row) { return merged({0, backend_.getSize()}, row); }

 private:
  using Clock = std::chrono::steady_clock;

  /// [begin, end).
  struct Ranks {
    int begin, end;
    int size() const { return end - begin; }
  };

  at::Tensor merged(Ranks ranks, const at::Tensor& row);

  c10d::Backend& backend_;
  const int tag_;
  const MergeRows merge_;
  const Clock::time_point deadline_;
};

}  // namespace syncbn::dist::detail
