#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "transport/exchange.h"
#include "transport/gloo.h"
#include "transport/operation.h"
#include "transport/reduce.h"

namespace syncbn::dist::detail::shm {

/// Carries out the most frequent collectives of a group on one host through shared memory, and the
/// other calls (by kind, dtype or device) over Gloo. All ranks choose the same one for a call.
class SharedMemory : public Transport, private c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  /// @param exchange connects the ranks of this host. @param gloo connects all ranks.
  SharedMemory(std::shared_ptr<Exchange> exchange, std::shared_ptr<Gloo> gloo);
  ~SharedMemory() override { exchange_->stop(); }

  /// The number of calls that went through shared memory.
  uint64_t calls() const { return calls_; }

  c10d::Backend& prepare(const Call& call) override;
  void set_timeout(std::chrono::milliseconds timeout) override;
  void abort() override;
  void shutdown() override;
  void close() override { gloo_->close(); }
  bool gathers_in_one_hop(size_t bytes) const override;
  void gather_in_one_hop(const Call& call, const at::Tensor& all, std::chrono::milliseconds timeout,
                         c10::function_ref<void()> started) override;
  at::Tensor merge_in_tree(const Call& call, const at::Tensor& row, MergeRows merge,
                           std::chrono::milliseconds timeout,
                           c10::function_ref<void()> started) override;

 protected:
  const std::shared_ptr<Exchange> exchange_;

 private:
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

  // Tensors may have any strides, which may differ between ranks. `outputs` has one for each rank.
  virtual std::unique_ptr<Operation> make_all_reduce(const at::Tensor& tensor, Reduce reduce,
                                                     c10d::ReduceOp::RedOpType op);
  virtual std::unique_ptr<Operation> make_all_gather(const Tensors& outputs,
                                                     const at::Tensor& input);
  virtual std::unique_ptr<Operation> make_broadcast(const at::Tensor& tensor, int root);
  virtual std::unique_ptr<Operation> make_barrier();
  /// As LeaderOperation's `leaders`.
  virtual std::shared_ptr<Gloo> leaders() const { return nullptr; }

  WorkPtr start(c10d::OpType type, std::unique_ptr<Operation> operation,
                std::chrono::milliseconds timeout);
  void run(const Call& call, std::unique_ptr<Operation> operation,
           std::chrono::milliseconds timeout, c10::function_ref<void()> started);
  std::chrono::milliseconds timeout_or_default(std::chrono::milliseconds timeout) const {
    return timeout == c10d::kUnsetTimeout ? timeout_ : timeout;
  }

  const std::shared_ptr<Gloo> gloo_;
  std::chrono::milliseconds timeout_{0};
  uint64_t tag_ = 0;  ///< of the prepared call
  std::atomic<uint64_t> calls_ = 0;
};

}  // namespace syncbn::dist::detail::shm
