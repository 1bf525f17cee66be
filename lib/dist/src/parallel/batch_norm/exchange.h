#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>

#include <ATen/core/ivalue.h>

#include <syncbn/dist/collectives.h>
#include <syncbn/dist/process_group.h>

namespace syncbn::dist::detail {

/// How messages call a layer, and how ranks compare it.
struct LayerName {
  /// As in named_modules(). Empty: the layer goes by the order in which layers first exchange.
  std::string given;
  /// Of this layer alone in this process.
  const uint64_t id = ++made;

  static std::atomic<uint64_t> made;
};

/// The exchanges of one forward of a layer and of its backward. Each carries the layer's name, its
/// channels, the input's dtype and the number of the exchange; where these differ between ranks,
/// every rank throws base::UserError with the ranks and their layers, and where the number of
/// channels does, too. In a group whose calls nobody compares, one message more goes ahead for
/// that. Where rows are on GPUs, the header goes beside them, between the processes; over NCCL
/// nobody waits for it, so that a later exchange of each rank throws, and rows are mixed up until
/// then. Alone nothing is exchanged: this rank's values are those of all.
class Exchange : public torch::CustomClassHolder {
 public:
  /// @param group null, or of one rank: this rank alone.
  /// @param timeout of each exchange; the group's when not given.
  Exchange(const LayerName& layer, int64_t channels, at::ScalarType dtype,
           const ProcessGroupPtr& group, Timeout timeout);

  int ranks() const { return group_ ? group_->getSize() : 1; }

  /// Every rank's values: [n] float64 in, [W, n or more] out, in the order of ranks, where the
  /// first n of each row are the values.
  at::Tensor gather(const at::Tensor& values) const;
  /// The sum of every rank's values: [n] float64 in, [n] out, the same bits on each rank.
  at::Tensor sum(const at::Tensor& values) const;

 private:
  struct Names;
  struct Group;
  struct Layer;
  friend void join_exchange(const at::Tensor& row, const ProcessGroupPtr& group);

  using Header = std::array<double, 3>;
  Header next_header() const;
  void compare(const at::Tensor& rows, int64_t first) const;
  void agree(const Header& header, const at::Tensor& row) const;
  void agree_beside(const Header& header) const;

  const ProcessGroupPtr group_;
  const Timeout timeout_;
  Group* state_ = nullptr;        ///< what is known of the group; outlives this
  const Layer* layer_ = nullptr;  ///< as the group knows it; outlives this
};

/// Counts an exchange of such a row that this rank takes part in without running the layer, and is
/// called ahead of it.
void join_exchange(const at::Tensor& row, const ProcessGroupPtr& group);

}  // namespace syncbn::dist::detail
