#pragma once

#include <functional>

#include <ATen/core/Tensor.h>

namespace syncbn::dist::detail {

namespace cuda {
struct PeerGatherArguments;
}

/// A row of float64 for other ranks. On a GPU its kernel may not be launched yet: it can gather the
/// rows of all ranks as well, which saves a launch.
struct PendingRow {
  at::Tensor row = {};  ///< [n]
  /// Launches the kernel on the current stream; it gathers unless `peers` is null. Empty: the row
  /// is computed.
  std::function<void(const cuda::PeerGatherArguments* peers)> launch = {};

  /// The row, which this has launched.
  at::Tensor now() const {
    if (launch) launch(nullptr);
    return row;
  }
};

/// While it lives, an all-gather of the row by this thread through peer memory is launched by the
/// row's own kernel.
class GatherByOwnKernel {
 public:
  explicit GatherByOwnKernel(const PendingRow& row) : row_(row) { current_ = this; }
  ~GatherByOwnKernel() { current_ = nullptr; }
  GatherByOwnKernel(const GatherByOwnKernel&) = delete;
  GatherByOwnKernel& operator=(const GatherByOwnKernel&) = delete;

  bool has_launched() const { return has_launched_; }

  /// Called by what gathers. @return false if the row has been computed already
  static bool launch(const cuda::PeerGatherArguments& peers, const double* row);

 private:
  static thread_local GatherByOwnKernel* current_;
  const PendingRow& row_;
  bool has_launched_ = false;
};

}  // namespace syncbn::dist::detail
