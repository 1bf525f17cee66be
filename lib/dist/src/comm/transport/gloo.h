#pragma once

#include <chrono>
#include <mutex>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "transport/transport.h"

namespace syncbn::dist::detail {

class TaggedGloo;

/// c10d's ProcessGroupGloo, which copies CUDA tensors through the host.
class Gloo : public Transport {
 public:
  /// Connects a full mesh of the ranks for each of this host's `addresses`; if there are none, over
  /// the address that Python's torch.distributed chooses.
  /// @param all_ours whether no rank runs Python's torch.distributed. Ranks that make different
  ///   calls then wait for each other instead of overwriting each other's tensors.
  Gloo(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
       const std::vector<std::string>& addresses, std::chrono::milliseconds timeout, bool all_ours);
  ~Gloo() override;

  c10::intrusive_ptr<c10d::Backend> backend() const;
  /// Returns the backend; its next collective matches those with the same tag_of() on other ranks.
  c10d::Backend& with_tag(uint64_t tag);

  c10d::Backend& prepare(const Call& call) override;
  void set_timeout(std::chrono::milliseconds timeout) override;
  void abort() override;
  void shutdown() override;
  void close() override;
  bool gathers_in_one_hop(size_t bytes) const override;
  void gather_in_one_hop(const Call& call, const at::Tensor& all, std::chrono::milliseconds timeout,
                         c10::function_ref<void()> started) override;
  at::Tensor merge_in_tree(const Call& call, const at::Tensor& row, MergeRows merge,
                           std::chrono::milliseconds timeout,
                           c10::function_ref<void()> started) override;
  /// Recursive doubling: ceil(log2 of the ranks) hops, in each of which a rank receives one row.
  /// @param tag as tag_of(). @param timeout of the whole merge.
  at::Tensor merge_in_tree(uint64_t tag, const at::Tensor& row, MergeRows merge,
                           std::chrono::milliseconds timeout);

 private:
  const bool all_ours_;
  std::mutex mutex_;  ///< abort() and close() exclude each other
  c10::intrusive_ptr<TaggedGloo> gloo_;
};

}  // namespace syncbn::dist::detail
