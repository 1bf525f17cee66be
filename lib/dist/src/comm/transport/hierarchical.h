#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "transport/operation.h"
#include "transport/operations.h"

namespace syncbn::dist::detail::shm {

// For groups on several hosts: first the ranks of each host give what they have to its leader, then
// the leaders do the same call over Gloo, and then each passes the outcome on to its host.

/// The hosts of a group.
struct Hosts {
  std::vector<std::vector<int>> ranks;  ///< of the group, by host; the first is the leader
  size_t own = 0;
  c10::intrusive_ptr<c10d::Backend> leaders;  ///< Gloo between them; null on other ranks

  int count_ranks() const;
  bool is_leader() const { return leaders != nullptr; }
  size_t host_of(int rank) const;
  /// How many the largest host has.
  size_t most_ranks() const;
};

/// Of one call: on all hosts, and on this one.
struct HostHierarchy {
  std::shared_ptr<const Hosts> hosts;
  Setting setting;  ///< of this host
  uint64_t tag;
  std::chrono::steady_clock::time_point deadline;
};

std::unique_ptr<Operation> all_reduce(const HostHierarchy& across, const at::Tensor& tensor,
                                      Reduce reduce, c10d::ReduceOp::RedOpType op);
std::unique_ptr<Operation> all_gather(const HostHierarchy& across, std::vector<at::Tensor> outputs,
                                      const at::Tensor& input);
std::unique_ptr<Operation> broadcast(const HostHierarchy& across, const at::Tensor& tensor,
                                     int root);
std::unique_ptr<Operation> barrier(const HostHierarchy& across);

}  // namespace syncbn::dist::detail::shm
