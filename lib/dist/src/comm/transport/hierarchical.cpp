#include "transport/hierarchical.h"

#include <algorithm>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "transport/leader_operation.h"
#include "transport/timeouts.h"

namespace syncbn::dist::detail::shm {

size_t Hosts::host_of(int rank) const {
  const auto has_rank = [rank](const std::vector<int>& host) {
    return std::find(host.begin(), host.end(), rank) != host.end();
  };
  return static_cast<size_t>(std::find_if(ranks.begin(), ranks.end(), has_rank) - ranks.begin());
}

int Hosts::count_ranks() const {
  size_t count = 0;
  for (const std::vector<int>& host : ranks) count += host.size();
  return static_cast<int>(count);
}

size_t Hosts::max_ranks() const {
  return std::ranges::max_element(ranks, {}, [](const auto& host) { return host.size(); })->size();
}

namespace {

class HierarchicalAllReduce : public LeaderOperation {
 public:
  HierarchicalAllReduce(const HostsPtr& hosts, const Layout& layout, const at::Tensor& tensor,
                        Reduce reduce, c10d::ReduceOp::RedOpType op)
      : LeaderOperation(hosts->leaders, layout, {tensor}, bytes_of(tensor), bytes_of(tensor)),
        hosts_(hosts),
        reduce_(reduce),
        op_(op) {}

 private:
  void publish_up(const Chunk& chunk, const Step& step) override {
    if (step.rank == kLeader) return;
    copy_bytes(step.input(step.rank), values().data() + chunk.begin, chunk.bytes);
  }

  void consume_up(const Chunk& chunk, const Step& step) override {
    if (step.ranks() == 1) return;
    c10::SmallVector<const void*, 16> inputs{values().data() + chunk.begin};
    for (int rank = 1; rank < step.ranks(); ++rank) inputs.push_back(step.input(rank));
    reduce_(values().data() + chunk.begin, inputs.data(), step.ranks(),
            chunk.bytes / values().element_size(), 1);
  }

  void compute_outcome(uint64_t tag, std::chrono::milliseconds timeout) override {
    if (values().bytes() == 0) return;
    const at::NoGradGuard no_grad;
    at::Tensor flat = values().flat();
    auto options = with_timeout<c10d::AllreduceOptions>(timeout);
    options.reduceOp = op_ == c10d::ReduceOp::AVG ? c10d::ReduceOp::SUM : op_;
    if (flat.scalar_type() == at::kBool) {  // Gloo has no bool
      flat = flat.view(at::kByte);
      const bool is_any = op_ == c10d::ReduceOp::SUM || op_ == c10d::ReduceOp::MAX;
      options.reduceOp = is_any ? c10d::ReduceOp::MAX : c10d::ReduceOp::MIN;
    }
    std::vector<at::Tensor> tensors{flat};
    leaders_->with_tag(tag).allreduce(tensors, options)->wait();
    if (op_ != c10d::ReduceOp::AVG) return;
    flat.div_(hosts_->count_ranks());
  }

  const HostsPtr hosts_;
  const Reduce reduce_;
  const c10d::ReduceOp::RedOpType op_;
};

class HierarchicalAllGather : public LeaderOperation {
 public:
  HierarchicalAllGather(const HostsPtr& hosts, const Layout& layout,
                        const std::vector<at::Tensor>& outputs, const at::Tensor& input)
      : LeaderOperation(hosts->leaders, layout, outputs, bytes_of(input),
                        bytes_of(input) * static_cast<int64_t>(outputs.size())),
        hosts_(hosts),
        input_(input),
        rows_(at::empty({static_cast<int64_t>(outputs.size()), input_.bytes()}, at::kByte)) {
    if (!leaders_) return;
    host_rows_ = at::empty({static_cast<int64_t>(hosts->max_ranks()), input_.bytes()}, at::kByte);
  }

  void finish() override {
    for (size_t rank = 0; rank < outputs_.size(); ++rank) {
      copy_bytes(outputs_[rank].data(), row(rows_, rank), input_.bytes());
    }
    Operation::finish();
  }

 private:
  std::byte* row(const at::Tensor& rows, size_t index) const {
    return static_cast<std::byte*>(rows.data_ptr()) + static_cast<int64_t>(index) * input_.bytes();
  }

  void publish_up(const Chunk& chunk, const Step& step) override {
    copy_bytes(step.input(step.rank), input_.data() + chunk.begin, chunk.bytes);
  }

  void consume_up(const Chunk& chunk, const Step& step) override {
    for (int rank = 0; rank < step.ranks(); ++rank) {
      copy_bytes(row(host_rows_, static_cast<size_t>(rank)) + chunk.begin, step.input(rank),
                 chunk.bytes);
    }
  }

  // Hosts may have different numbers of ranks, but Gloo needs the same number of rows from each.
  void compute_outcome(uint64_t tag, std::chrono::milliseconds timeout) override {
    if (input_.bytes() == 0) return;
    c10d::Backend& leaders = leaders_->with_tag(tag);
    at::Tensor all = at::empty({leaders.getSize() * host_rows_.numel()}, at::kByte);
    at::Tensor own = host_rows_.view(-1);
    leaders._allgather_base(all, own, with_timeout<c10d::AllgatherOptions>(timeout))->wait();
    const at::Tensor by_host = all.view({leaders.getSize(), -1});
    for (size_t host = 0; host < hosts_->ranks.size(); ++host) {
      const std::vector<int>& ranks = hosts_->ranks[host];
      for (size_t i = 0; i < ranks.size(); ++i) {
        copy_bytes(row(rows_, static_cast<size_t>(ranks[i])),
                   row(by_host[static_cast<int64_t>(host)], i), input_.bytes());
      }
    }
  }

  std::byte* outcome() override { return row(rows_, 0); }

  const HostsPtr hosts_;
  const Dense input_;
  const at::Tensor rows_;  ///< of all ranks, as bytes
  at::Tensor host_rows_;   ///< on the leader: of its host's ranks
};

class HierarchicalBroadcast : public LeaderOperation {
 public:
  HierarchicalBroadcast(const HostsPtr& hosts, const Layout& layout, const at::Tensor& tensor,
                        int root)
      : LeaderOperation(hosts->leaders, layout, {tensor}, bytes_of(tensor), bytes_of(tensor)),
        hosts_(hosts),
        host_(hosts->host_of(root)) {
    const std::vector<int>& ranks = hosts->ranks[host_];
    root_ = static_cast<int>(std::find(ranks.begin(), ranks.end(), root) - ranks.begin());
  }

 private:
  bool is_here() const { return host_ == hosts_->own; }

  void publish_up(const Chunk& chunk, const Step& step) override {
    if (!is_here() || step.rank != root_) return;
    copy_bytes(step.input(root_), values().data() + chunk.begin, chunk.bytes);
  }

  void consume_up(const Chunk& chunk, const Step& step) override {
    if (is_here()) copy_bytes(values().data() + chunk.begin, step.input(root_), chunk.bytes);
  }

  void compute_outcome(uint64_t tag, std::chrono::milliseconds timeout) override {
    if (values().bytes() == 0) return;
    std::vector<at::Tensor> tensors{values().flat().view(at::kByte)};
    auto options = with_timeout<c10d::BroadcastOptions>(timeout);
    options.rootRank = static_cast<int64_t>(host_);
    leaders_->with_tag(tag).broadcast(tensors, options)->wait();
  }

  const HostsPtr hosts_;
  const size_t host_;  ///< the root's
  int root_ = 0;       ///< among the ranks of its host
};

class HierarchicalBarrier : public LeaderOperation {
 public:
  HierarchicalBarrier(const HostsPtr& hosts, const Layout& layout)
      : LeaderOperation(hosts->leaders, layout, {}, 0, 0) {}

 private:
  void compute_outcome(uint64_t tag, std::chrono::milliseconds timeout) override {
    leaders_->with_tag(tag).barrier(with_timeout<c10d::BarrierOptions>(timeout))->wait();
  }
};

}  // namespace

void Hierarchical::set_timeout(std::chrono::milliseconds timeout) {
  SharedMemory::set_timeout(timeout);
  if (hosts_->leaders) hosts_->leaders->set_timeout(timeout);
}

void Hierarchical::abort() {
  SharedMemory::abort();
  if (hosts_->leaders) hosts_->leaders->abort();
}

/// A pending operation may wait for the other leaders, and the exchange cannot stop until it ends.
void Hierarchical::release_leader() {
  exchange_->abort();
  if (hosts_->leaders && !exchange_->is_idle()) hosts_->leaders->abort();
}

void Hierarchical::shutdown() {
  release_leader();
  SharedMemory::shutdown();
}

std::unique_ptr<Operation> Hierarchical::make_all_reduce(const at::Tensor& tensor, Reduce reduce,
                                                         c10d::ReduceOp::RedOpType op) {
  return std::make_unique<HierarchicalAllReduce>(hosts_, exchange_->layout(), tensor, reduce, op);
}

std::unique_ptr<Operation> Hierarchical::make_all_gather(const Tensors& outputs,
                                                         const at::Tensor& input) {
  return std::make_unique<HierarchicalAllGather>(hosts_, exchange_->layout(), outputs, input);
}

std::unique_ptr<Operation> Hierarchical::make_broadcast(const at::Tensor& tensor, int root) {
  return std::make_unique<HierarchicalBroadcast>(hosts_, exchange_->layout(), tensor, root);
}

std::unique_ptr<Operation> Hierarchical::make_barrier() {
  return std::make_unique<HierarchicalBarrier>(hosts_, exchange_->layout());
}

}  // namespace syncbn::dist::detail::shm
