#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "transport/exchange.h"
#include "transport/hierarchical.h"
#include "transport/operations.h"

namespace syncbn::dist::detail::shm {

/// The collectives of a group whose ranks, or some of them, share a host's memory. Each function
/// returns null, and does nothing, where the call is one for Gloo; for calls that are equal it does
/// so on all ranks. Tensors are on the CPU.
class SharedMemory {
 public:
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  /// @param exchange with the ranks of this host. @param hosts of the group.
  SharedMemory(std::shared_ptr<Exchange> exchange, std::shared_ptr<const Hosts> hosts)
      : exchange_(std::move(exchange)), hosts_(std::move(hosts)), size_(hosts_->count_ranks()) {}
  ~SharedMemory() { shutdown(); }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  /// Where an operation's options give no timeout.
  void set_timeout(std::chrono::milliseconds timeout);
  /// Makes all that is under way, and all that comes, fail. Any thread may call it.
  void break_off();
  /// The same for good.
  void shutdown();

  /// @param tag equal on ranks that call the same; others wait for each other.
  WorkPtr allreduce(uint64_t tag, const Tensors& tensors, const c10d::AllreduceOptions& options);
  WorkPtr allgather(uint64_t tag, const std::vector<Tensors>& outputs, const Tensors& inputs,
                    const c10d::AllgatherOptions& options);
  WorkPtr allgather_base(uint64_t tag, const at::Tensor& output, const at::Tensor& input,
                         const c10d::AllgatherOptions& options);
  WorkPtr broadcast(uint64_t tag, const Tensors& tensors, const c10d::BroadcastOptions& options);
  WorkPtr barrier(uint64_t tag, const c10d::BarrierOptions& options);

  /// Whether gather_at_once() serves for so many bytes of each rank; the same on all ranks.
  bool gathers_at_once(int64_t bytes) const;
  /// An all-gather that a thread waits for at once. @param all as in gather_in_place().
  Exchange::TaskPtr gather_at_once(uint64_t tag, const at::Tensor& all,
                                   std::chrono::milliseconds timeout);
  void wait(const Exchange::TaskPtr& task) { exchange_->wait(task, kNoTimeout); }

 private:
  Setting setting() const { return {exchange_->layout(), exchange_->rank(), exchange_->ranks()}; }
  std::chrono::milliseconds or_own(std::chrono::milliseconds timeout) const {
    return timeout == c10d::kUnsetTimeout ? timeout_ : timeout;
  }
  WorkPtr start(c10d::OpType type, uint64_t tag, std::unique_ptr<Operation> operation,
                std::chrono::milliseconds timeout);
  WorkPtr gather(c10d::OpType type, uint64_t tag, const Tensors& outputs, const at::Tensor& input,
                 std::chrono::milliseconds timeout);
  bool on_one_host() const { return hosts_->ranks.size() == 1; }
  HostHierarchy across(uint64_t tag, std::chrono::milliseconds timeout) const {
    return {hosts_, setting(), tag, std::chrono::steady_clock::now() + or_own(timeout)};
  }

  const std::shared_ptr<Exchange> exchange_;
  const std::shared_ptr<const Hosts> hosts_;
  const int size_;  ///< of the group
  std::chrono::milliseconds timeout_{0};
};

}  // namespace syncbn::dist::detail::shm
