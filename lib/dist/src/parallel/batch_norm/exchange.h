#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>

#include <ATen/core/ivalue.h>

#include <syncbn/dist/collectives.h>
#include <syncbn/dist/process_group.h>

#include "batch_norm/join_statistics.h"
#include "transport/pending_row.h"

namespace syncbn::dist::detail {

/// The name of a layer in messages and in comparisons between ranks.
struct LayerName {
  /// As in named_modules(). Empty: the layer gets a number when it first exchanges.
  std::string given;
  const uint64_t id = ++made;  ///< unique in this process

  inline static std::atomic<uint64_t> made{0};
};

/// The exchanges of one forward of a layer and of its backward. A header with the layer's name, its
/// channels, the input's dtype and the number of the exchange belongs to each; if headers differ,
/// every rank throws base::UserError that names the ranks and their layers. On CPUs the header is
/// part of the row; rows with different headers that were merged on the way are marked, and ranks
/// then gather the headers. In groups whose calls are not compared otherwise, a message with the
/// row's size precedes the row. Headers of rows on GPUs travel between the processes; over NCCL no
/// rank waits for them, so a later exchange throws, and rows of different layers are mixed until
/// then. A single rank exchanges nothing.
class Exchange : public torch::CustomClassHolder {
 public:
  /// @param group null, or of one rank: nothing is exchanged.
  /// @param timeout of each exchange; unset: the group's.
  Exchange(const LayerName& layer, int64_t channels, at::ScalarType dtype,
           const ProcessGroupPtr& group, Timeout timeout);

  int ranks() const { return group_ ? group_->getSize() : 1; }

  /// [2C+1] in, as BatchNormKernels::moments() returns them. Out what BatchNormKernels::merge()
  /// takes: a row of each rank, in the order of ranks, or one row if they were merged on the way.
  at::Tensor moments(const PendingRow& own) const;
  /// [n] float64 in. Out rows whose sum is that of every rank's values: a row of each rank on up to
  /// 16 GPUs, [W, n], otherwise one. The same bits on each rank.
  at::Tensor sums(const PendingRow& own) const;

 private:
  struct Names;
  struct Group;
  struct Layer;
  friend void join_exchange(JoinStep step, const at::Tensor& row, const ProcessGroupPtr& group);

  using Header = std::array<double, 3>;
  Header next_header() const;
  at::Tensor exchange(JoinStep step, const PendingRow& own) const;
  at::Tensor prepare_row(const at::Tensor& values, const Header& header, JoinStep step) const;
  void compare(const at::Tensor& rows, int64_t first, bool tells_others = false) const;

  const ProcessGroupPtr group_;
  const Timeout timeout_;
  Group* state_ = nullptr;        ///< outlives this
  const Layer* layer_ = nullptr;  ///< outlives this
};

/// Takes part in moments() or sum() of the other ranks without running the layer.
/// @param row of zeros, with the header's columns.
void join_exchange(JoinStep step, const at::Tensor& row, const ProcessGroupPtr& group);

}  // namespace syncbn::dist::detail
