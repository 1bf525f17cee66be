#pragma once

#include <functional>

#include <ATen/core/Tensor.h>

namespace syncbn::dist::detail {

namespace cuda {
struct PeerGatherArguments;
}

/// A row of float64 for other ranks. On a GPU the kernel that computes it may not be launched yet:
/// the same kernel can also gather the rows of all ranks, which saves a launch.
struct PendingRow {
  at::Tensor row = {};  ///< [n]
  /// Launches the kernel on the current stream; it also gathers unless `peers` is null. Empty: the
  /// row is already computed.
  std::function<void(const cuda::PeerGatherArguments* peers)> launch = {};

  /// Returns the row; launches its kernel, without a gather, if that is still to be done.
  at::Tensor now() const {
    if (launch) launch(nullptr);
    return row;
  }
};

/// While it lives, an all-gather of the row by this thread through peer memory runs in the row's
/// own kernel.
class GatherByOwnKernel {
 public:
  explicit GatherByOwnKernel(const PendingRow& row) : row_(row) { current_ = this; }
  ~GatherByOwnKernel() { current_ = nullptr; }
  GatherByOwnKernel(const GatherByOwnKernel&) = delete;
  GatherByOwnKernel& operator=(const GatherByOwnKernel&) = delete;

  bool has_launched() const { return has_launched_; }

  /// PeerGather calls it. @return false if `row` is not the row of this thread's guard
  static bool launch(const cuda::PeerGatherArguments& peers, const double* row);

 private:
  static thread_local GatherByOwnKernel* current_;
  const PendingRow& row_;
  bool has_launched_ = false;
};

}  // namespace syncbn::dist::detail
