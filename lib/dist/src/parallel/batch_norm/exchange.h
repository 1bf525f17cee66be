#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include <ATen/core/ivalue.h>

#include <syncbn/dist/collectives.h>
#include <syncbn/dist/process_group.h>

#include "batch_norm/join_statistics.h"

namespace syncbn::dist::detail {

/// The name of a layer in messages and in comparisons between ranks.
struct LayerName {
  /// As in named_modules(). Empty: the layer gets a number when it first exchanges.
  std::string given;
  const uint64_t id = ++made;  ///< unique in this process

  inline static std::atomic<uint64_t> made{0};
};

/// The exchanges of one forward of a layer and of its backward. A single rank exchanges nothing.
///
/// On CPUs each exchange has a header: the layer's name, its channels, the input's dtype and the
/// number of the exchange. If headers differ, every rank throws base::UserError naming the ranks
/// and their layers. The header is part of the row. A merge on the way marks its row if headers
/// differ, and the ranks then gather the headers. In groups whose calls nothing else compares, a
/// message with the row's size precedes the row. Rows on GPUs have no header, as PyTorch's: there
/// only sizes and dtypes are compared, as those of any call.
class Exchange : public torch::CustomClassHolder {
 public:
  /// @param group null or of one rank: there is no exchange.
  /// @param timeout of each exchange; unset: the group's.
  Exchange(const LayerName& layer, int64_t channels, at::ScalarType dtype,
           const ProcessGroupPtr& group, Timeout timeout);

  int ranks() const { return group_ ? group_->getSize() : 1; }

  /// @param own [2C+1], from BatchNormKernels::moments()
  /// @return rows for BatchNormKernels::merge(): one per rank, in the order of ranks, or one row if
  ///   they were merged on the way
  at::Tensor moments(const at::Tensor& own) const;
  /// @param own [n]; on a GPU it is overwritten
  /// @return [n], the sum over ranks, with the same bits on each rank
  at::Tensor sums(const at::Tensor& own) const;

 private:
  struct Names;
  struct Group;
  struct Layer;
  friend void join_exchange(JoinStep step, const at::Tensor& row, const ProcessGroupPtr& group);

  at::Tensor exchange(JoinStep step, const at::Tensor& values) const;
  void compare(const at::Tensor& rows, int64_t first) const;

  const ProcessGroupPtr group_;
  const Timeout timeout_;
  Group* state_ = nullptr;        ///< outlives this
  const Layer* layer_ = nullptr;  ///< outlives this
};

/// Joins moments() or sums() of the other ranks without running the layer.
/// @param row zeros, including the header's columns on CPUs.
void join_exchange(JoinStep step, const at::Tensor& row, const ProcessGroupPtr& group);

}  // namespace syncbn::dist::detail
