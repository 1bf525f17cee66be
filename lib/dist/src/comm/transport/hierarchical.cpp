#include "transport/hierarchical.h"

#include <algorithm>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "transport/dense.h"
#include "transport/gloo.h"

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

size_t Hosts::most_ranks() const {
  const auto fewer = [](const auto& a, const auto& b) { return a.size() < b.size(); };
  return std::max_element(ranks.begin(), ranks.end(), fewer)->size();
}

namespace {

constexpr int kLeader = 0;  ///< among the ranks of a host

class HierarchicalOperation : public Operation {
 public:
  HierarchicalOperation(const HostHierarchy& across, int64_t bytes_up, int64_t bytes_down)
      : across_(across),
        up_(bytes_up, static_cast<int64_t>(across.setting.layout.input_bytes())),
        down_(bytes_down, static_cast<int64_t>(across.setting.layout.input_bytes())) {}

  int64_t steps() const override { return up_.count() + down_.count(); }
  bool blocks() const override { return hosts().is_leader(); }

  void put(int64_t step, const Slots& slots) override {
    if (step < up_.count()) return give(up_.at(step), slots);
    if (!hosts().is_leader()) return;
    if (step == up_.count()) meet();
    const Chunk part = down_.at(step - up_.count());
    copy_bytes(slots.input(kLeader), outcome() + part.begin, part.bytes);
  }

  void take(int64_t step, const Slots& slots) override {
    if (step < up_.count()) {
      if (hosts().is_leader()) collect(up_.at(step), slots);
      return;
    }
    const Chunk part = down_.at(step - up_.count());
    if (!hosts().is_leader()) {
      copy_bytes(outcome() + part.begin, slots.input(kLeader), part.bytes);
    }
  }

 protected:
  const Hosts& hosts() const { return *across_.hosts; }

  /// With what is left of the operation's timeout.
  template <class Options>
  Options options() const {
    using std::chrono::milliseconds;
    const auto left = across_.deadline - std::chrono::steady_clock::now();
    Options options;
    options.timeout = std::max(milliseconds(1), std::chrono::ceil<milliseconds>(left));
    return options;
  }

 private:
  /// Puts this rank's part of a chunk into its slot.
  virtual void give(const Chunk& chunk, const Slots& slots) = 0;
  /// The leader's: takes what those of its host have given.
  virtual void collect(const Chunk& chunk, const Slots& slots) = 0;
  /// The leader's: together with the others.
  virtual void call(c10d::Backend& leaders) = 0;
  /// What the leader passes on.
  virtual std::byte* outcome() = 0;

  void meet() {
    const uint64_t sequence = across_.tag >> 16;
    set_next_tag(*hosts().leaders,
                 static_cast<uint32_t>((across_.tag & 0xffff) << 16 | (sequence & 0xffff)));
    call(*hosts().leaders);
  }

  const HostHierarchy across_;
  const Chunks up_;
  const Chunks down_;
};

class AllReduce : public HierarchicalOperation {
 public:
  AllReduce(const HostHierarchy& across, const at::Tensor& tensor, Reduce reduce,
            c10d::ReduceOp::RedOpType op)
      : HierarchicalOperation(across, bytes_of(tensor), bytes_of(tensor)),
        values_(tensor),
        reduce_(reduce),
        op_(op) {}

  void finish() override { values_.write_back(); }
  std::vector<at::Tensor> result() const override { return {values_.tensor()}; }

 private:
  void give(const Chunk& chunk, const Slots& slots) override {
    if (slots.rank() == kLeader) return;
    copy_bytes(slots.input(slots.rank()), values_.data() + chunk.begin, chunk.bytes);
  }

  void collect(const Chunk& chunk, const Slots& slots) override {
    if (slots.ranks() == 1) return;
    c10::SmallVector<const void*, 16> inputs{values_.data() + chunk.begin};
    for (int rank = 1; rank < slots.ranks(); ++rank) inputs.push_back(slots.input(rank));
    reduce_(values_.data() + chunk.begin, inputs.data(), slots.ranks(),
            chunk.bytes / values_.element_size(), 1);
  }

  void call(c10d::Backend& leaders) override {
    if (values_.bytes() == 0) return;
    const at::NoGradGuard no_grad;
    at::Tensor values = values_.flat();
    auto options = this->options<c10d::AllreduceOptions>();
    options.reduceOp = op_ == c10d::ReduceOp::AVG ? c10d::ReduceOp::SUM : op_;
    if (values.scalar_type() == at::kBool) {  // which Gloo does not know
      values = values.view(at::kByte);
      const bool is_any = op_ == c10d::ReduceOp::SUM || op_ == c10d::ReduceOp::MAX;
      options.reduceOp = is_any ? c10d::ReduceOp::MAX : c10d::ReduceOp::MIN;
    }
    std::vector<at::Tensor> tensors{values};
    leaders.allreduce(tensors, options)->wait();
    if (op_ != c10d::ReduceOp::AVG) return;
    values.div_(hosts().count_ranks());
  }

  std::byte* outcome() override { return values_.data(); }

  const Dense values_;
  const Reduce reduce_;
  const c10d::ReduceOp::RedOpType op_;
};

class HierarchicalAllGather : public HierarchicalOperation {
 public:
  HierarchicalAllGather(const HostHierarchy& across, std::vector<at::Tensor> outputs,
                        const at::Tensor& input)
      : HierarchicalOperation(across, bytes_of(input),
                              bytes_of(input) * static_cast<int64_t>(outputs.size())),
        input_(input),
        given_(std::move(outputs)),
        rows_(at::empty({static_cast<int64_t>(given_.size()), input_.bytes()}, at::kByte)) {
    for (const at::Tensor& output : given_) outputs_.emplace_back(output);
    if (!hosts().is_leader()) return;
    host_rows_ = at::empty({static_cast<int64_t>(hosts().most_ranks()), input_.bytes()}, at::kByte);
  }

  void finish() override {
    for (size_t rank = 0; rank < outputs_.size(); ++rank) {
      copy_bytes(outputs_[rank].data(), row(rows_, rank), input_.bytes());
      outputs_[rank].write_back();
    }
  }
  std::vector<at::Tensor> result() const override { return given_; }

 private:
  std::byte* row(const at::Tensor& rows, size_t index) const {
    return static_cast<std::byte*>(rows.data_ptr()) + static_cast<int64_t>(index) * input_.bytes();
  }

  void give(const Chunk& chunk, const Slots& slots) override {
    copy_bytes(slots.input(slots.rank()), input_.data() + chunk.begin, chunk.bytes);
  }

  void collect(const Chunk& chunk, const Slots& slots) override {
    for (int rank = 0; rank < slots.ranks(); ++rank) {
      copy_bytes(row(host_rows_, static_cast<size_t>(rank)) + chunk.begin, slots.input(rank),
                 chunk.bytes);
    }
  }

  // Hosts may have different numbers of ranks, and Gloo wants as many rows from each.
  void call(c10d::Backend& leaders) override {
    if (input_.bytes() == 0) return;
    at::Tensor all = at::empty({leaders.getSize() * host_rows_.numel()}, at::kByte);
    at::Tensor own = host_rows_.view(-1);
    leaders._allgather_base(all, own, options<c10d::AllgatherOptions>())->wait();
    const at::Tensor by_host = all.view({leaders.getSize(), -1});
    for (size_t host = 0; host < hosts().ranks.size(); ++host) {
      const std::vector<int>& ranks = hosts().ranks[host];
      for (size_t i = 0; i < ranks.size(); ++i) {
        copy_bytes(row(rows_, static_cast<size_t>(ranks[i])),
                   row(by_host[static_cast<int64_t>(host)], i), input_.bytes());
      }
    }
  }

  std::byte* outcome() override { return row(rows_, 0); }

  const Dense input_;
  const std::vector<at::Tensor> given_;
  std::vector<Dense> outputs_;
  const at::Tensor rows_;  ///< of all ranks, as bytes
  at::Tensor host_rows_;   ///< of the leader's host
};

class HierarchicalBroadcast : public HierarchicalOperation {
 public:
  HierarchicalBroadcast(const HostHierarchy& across, const at::Tensor& tensor, int root)
      : HierarchicalOperation(across, bytes_of(tensor), bytes_of(tensor)),
        values_(tensor),
        host_(hosts().host_of(root)) {
    const std::vector<int>& its_ranks = hosts().ranks[host_];
    root_ =
        static_cast<int>(std::find(its_ranks.begin(), its_ranks.end(), root) - its_ranks.begin());
  }

  void finish() override { values_.write_back(); }
  std::vector<at::Tensor> result() const override { return {values_.tensor()}; }

 private:
  bool is_here() const { return host_ == hosts().own; }

  void give(const Chunk& chunk, const Slots& slots) override {
    if (!is_here() || slots.rank() != root_) return;
    copy_bytes(slots.input(root_), values_.data() + chunk.begin, chunk.bytes);
  }

  void collect(const Chunk& chunk, const Slots& slots) override {
    if (is_here()) copy_bytes(values_.data() + chunk.begin, slots.input(root_), chunk.bytes);
  }

  void call(c10d::Backend& leaders) override {
    if (values_.bytes() == 0) return;
    std::vector<at::Tensor> tensors{values_.flat().view(at::kByte)};
    auto options = this->options<c10d::BroadcastOptions>();
    options.rootRank = static_cast<int64_t>(host_);
    leaders.broadcast(tensors, options)->wait();
  }

  std::byte* outcome() override { return values_.data(); }

  const Dense values_;
  const size_t host_;  ///< the root's
  int root_ = 0;       ///< among the ranks of its host
};

class HierarchicalBarrier : public HierarchicalOperation {
 public:
  explicit HierarchicalBarrier(const HostHierarchy& across) : HierarchicalOperation(across, 0, 0) {}
  std::vector<at::Tensor> result() const override { return {}; }

 private:
  void give(const Chunk& /*chunk*/, const Slots& /*slots*/) override {}
  void collect(const Chunk& /*chunk*/, const Slots& /*slots*/) override {}
  void call(c10d::Backend& leaders) override {
    leaders.barrier(options<c10d::BarrierOptions>())->wait();
  }
  std::byte* outcome() override { return nullptr; }
};

}  // namespace

std::unique_ptr<Operation> all_reduce(const HostHierarchy& across, const at::Tensor& tensor,
                                      Reduce reduce, c10d::ReduceOp::RedOpType op) {
  return std::make_unique<AllReduce>(across, tensor, reduce, op);
}

std::unique_ptr<Operation> all_gather(const HostHierarchy& across, std::vector<at::Tensor> outputs,
                                      const at::Tensor& input) {
  return std::make_unique<HierarchicalAllGather>(across, std::move(outputs), input);
}

std::unique_ptr<Operation> broadcast(const HostHierarchy& across, const at::Tensor& tensor,
                                     int root) {
  return std::make_unique<HierarchicalBroadcast>(across, tensor, root);
}

std::unique_ptr<Operation> barrier(const HostHierarchy& across) {
  return std::make_unique<HierarchicalBarrier>(across);
}

}  // namespace syncbn::dist::detail::shm
