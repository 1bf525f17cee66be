#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "transport/shared_memory.h"

namespace syncbn::dist::detail::shm {

struct Hosts {
  std::vector<std::vector<int>> ranks;  ///< by host; the first of a host is its leader
  size_t own = 0;                       ///< index of this host
  std::shared_ptr<Gloo> leaders;        ///< connects the leaders; null on other ranks

  int count_ranks() const;
  size_t host_of(int rank) const;
  size_t max_ranks() const;  ///< of one host
};

using HostsPtr = std::shared_ptr<const Hosts>;

/// SharedMemory for a group on several hosts: the leader of each host consumes the values of its
/// ranks, the leaders make the call over Gloo, and each publishes the outcome on its host.
class Hierarchical : public SharedMemory {
 public:
  Hierarchical(std::shared_ptr<Exchange> exchange, std::shared_ptr<Gloo> gloo, HostsPtr hosts)
      : SharedMemory(std::move(exchange), std::move(gloo)), hosts_(std::move(hosts)) {}
  ~Hierarchical() override { release_leader(); }

  void set_timeout(std::chrono::milliseconds timeout) override;
  void abort() override;
  void shutdown() override;
  bool gathers_in_one_hop(size_t /*bytes*/) const override { return false; }

 private:
  std::unique_ptr<Operation> make_all_reduce(const at::Tensor& tensor, Reduce reduce,
                                             c10d::ReduceOp::RedOpType op) override;
  std::unique_ptr<Operation> make_all_gather(const Tensors& outputs,
                                             const at::Tensor& input) override;
  std::unique_ptr<Operation> make_broadcast(const at::Tensor& tensor, int root) override;
  std::unique_ptr<Operation> make_barrier() override;
  std::shared_ptr<Gloo> leaders() const override { return hosts_->leaders; }

  void release_leader();

  const HostsPtr hosts_;
};

}  // namespace syncbn::dist::detail::shm
