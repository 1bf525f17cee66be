#include "transport/shared_memory.h"

#include <algorithm>
#include <array>
#include <utility>

#include <ATen/ops/empty.h>

#include "transport/leader_operation.h"

namespace syncbn::dist::detail::shm {
namespace {

using c10d::OpType;

bool is_plain(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_cpu() && tensor.layout() == at::kStrided;
}

// Upper bound on the bytes of all ranks together for which each rank reduces everything itself, in
// one step instead of two.
constexpr int64_t kMaxReducedByAll = int64_t{128} << 10;
constexpr int64_t kCacheLine = 64;

int64_t divide_up(int64_t value, int64_t by) {
  return (value + by - 1) / by;
}

/// Small tensors: every rank reduces the whole tensor.
class AllReduceByAll : public Operation {
 public:
  AllReduceByAll(const at::Tensor& tensor, Reduce reduce, int divisor)
      : Operation({tensor}), reduce_(reduce), divisor_(divisor) {}

  void publish(const Step& step) override {
    copy_bytes(step.input(step.rank), values().data(), values().bytes());
  }
  void consume(const Step& step) override {
    c10::SmallVector<const void*, 16> inputs;
    for (int rank = 0; rank < step.ranks(); ++rank) inputs.push_back(step.input(rank));
    reduce_(values().data(), inputs.data(), step.ranks(),
            values().bytes() / values().element_size(), divisor_);
  }

 private:
  const Reduce reduce_;
  const int divisor_;
};

/// Large tensors: each rank reduces one part of each chunk, for all ranks. A step distributes the
/// results of one chunk and publishes the next.
class AllReduceInParts : public Operation {
 public:
  AllReduceInParts(const Layout& layout, const at::Tensor& tensor, Reduce reduce, int divisor)
      : Operation({tensor}),
        chunks_(bytes_of(tensor), layout),
        reduce_(reduce),
        divisor_(divisor) {}

  int64_t steps() const override { return chunks_.count() + 1; }

  void publish(const Step& step) override {
    if (step.number == chunks_.count()) return;
    for (int rank = 0; rank < step.ranks(); ++rank) {
      if (rank == step.rank) continue;
      const Chunk part = part_of(step.number, rank, step.ranks());
      copy_bytes(step.input(step.rank) + part.begin - chunks_.at(step.number).begin,
                 values().data() + part.begin, part.bytes);
    }
  }

  void consume(const Step& step) override {
    if (step.number > 0) consume_results(step);
    if (step.number < chunks_.count()) reduce_part(step);
  }

 private:
  /// The part of a chunk that a rank reduces; empty if there are too few values.
  Chunk part_of(int64_t chunk, int rank, int ranks) const {
    const Chunk whole = chunks_.at(chunk);
    const int64_t bytes = divide_up(divide_up(whole.bytes, ranks), kCacheLine) * kCacheLine;
    const int64_t begin = std::min(rank * bytes, whole.bytes);
    return {whole.begin + begin, std::min(bytes, whole.bytes - begin)};
  }

  void consume_results(const Step& step) const {
    for (int rank = 0; rank < step.ranks(); ++rank) {
      if (rank == step.rank) continue;
      const Chunk part = part_of(step.number - 1, rank, step.ranks());
      copy_bytes(values().data() + part.begin, step.result(rank), part.bytes);
    }
  }

  void reduce_part(const Step& step) const {
    const Chunk part = part_of(step.number, step.rank, step.ranks());
    c10::SmallVector<const void*, 16> inputs;
    for (int rank = 0; rank < step.ranks(); ++rank) {
      inputs.push_back(rank == step.rank
                           ? values().data() + part.begin
                           : step.input(rank) + part.begin - chunks_.at(step.number).begin);
    }
    reduce_(values().data() + part.begin, inputs.data(), step.ranks(),
            part.bytes / values().element_size(), divisor_);
    copy_bytes(step.next_result(), values().data() + part.begin, part.bytes);
  }

  const Chunks chunks_;
  const Reduce reduce_;
  const int divisor_;
};

class AllGather : public Operation {
 public:
  AllGather(const Layout& layout, const std::vector<at::Tensor>& outputs, const at::Tensor& input)
      : Operation(outputs), input_(input), chunks_(input_.bytes(), layout) {}

  int64_t steps() const override { return chunks_.count(); }

  void publish(const Step& step) override {
    const Chunk part = chunks_.at(step.number);
    copy_bytes(step.input(step.rank), input_.data() + part.begin, part.bytes);
  }
  void consume(const Step& step) override {
    const Chunk part = chunks_.at(step.number);
    for (int rank = 0; rank < step.ranks(); ++rank) {
      copy_bytes(outputs_[static_cast<size_t>(rank)].data() + part.begin, step.input(rank),
                 part.bytes);
    }
  }

 private:
  const Dense input_;
  const Chunks chunks_;
};

/// An all-gather of rows that fit into a slot. @param all contiguous, with this rank's row.
class GatherInPlace : public Operation {
 public:
  explicit GatherInPlace(const at::Tensor& all)
      : Operation({all}), row_bytes_(bytes_of(all) / all.size(0)) {}

  void publish(const Step& step) override {
    copy_bytes(step.input(step.rank), row(step.rank), row_bytes_);
  }
  void consume(const Step& step) override {
    for (int rank = 0; rank < step.ranks(); ++rank) {
      if (rank != step.rank) copy_bytes(row(rank), step.input(rank), row_bytes_);
    }
  }

 private:
  std::byte* row(int rank) const { return values().data() + rank * row_bytes_; }

  const int64_t row_bytes_;
};

/// The leader of each host merges the host's rows, and then the leaders merge those of all hosts.
class MergeInTree : public LeaderOperation {
 public:
  /// @param row [1, n], replaced by the merged row of all ranks.
  MergeInTree(std::shared_ptr<Gloo> leaders, const Layout& layout, const at::Tensor& row,
              MergeRows merge)
      : LeaderOperation(std::move(leaders), layout, {row}, bytes_of(row), bytes_of(row)),
        merge_(merge) {}

 private:
  void publish_up(const Chunk& chunk, const Step& step) override {
    copy_bytes(step.input(step.rank), values().data() + chunk.begin, chunk.bytes);
  }

  void consume_up(const Chunk& chunk, const Step& step) override {
    const at::Tensor& row = values().tensor();
    if (!rows_.defined()) rows_ = at::empty({step.ranks(), row.size(1)}, row.options());
    for (int rank = 0; rank < step.ranks(); ++rank) {
      auto* const to = static_cast<std::byte*>(rows_.mutable_data_ptr()) + rank * values().bytes();
      copy_bytes(to + chunk.begin, step.input(rank), chunk.bytes);
    }
  }

  void compute_outcome(uint64_t tag, std::chrono::milliseconds timeout) override {
    at::Tensor merged = merge_(rows_);
    if (leaders_) merged = leaders_->merge_in_tree(tag, merged, merge_, timeout);
    copy_bytes(values().data(), static_cast<const std::byte*>(merged.const_data_ptr()),
               values().bytes());
  }

  const MergeRows merge_;
  at::Tensor rows_;  ///< on the leader: of its host's ranks
};

class Broadcast : public Operation {
 public:
  Broadcast(const Layout& layout, const at::Tensor& tensor, int root)
      : Operation({tensor}), chunks_(bytes_of(tensor), layout), root_(root) {}

  int64_t steps() const override { return chunks_.count(); }

  void publish(const Step& step) override {
    if (step.rank != root_) return;
    const Chunk part = chunks_.at(step.number);
    copy_bytes(step.input(root_), values().data() + part.begin, part.bytes);
  }
  void consume(const Step& step) override {
    if (step.rank == root_) return;
    const Chunk part = chunks_.at(step.number);
    copy_bytes(values().data() + part.begin, step.input(root_), part.bytes);
  }

 private:
  const Chunks chunks_;
  const int root_;
};

class Barrier : public Operation {
 public:
  Barrier() : Operation({}) {}
  void publish(const Step& /*step*/) override {}
  void consume(const Step& /*step*/) override {}
};

}  // namespace

SharedMemory::SharedMemory(std::shared_ptr<Exchange> exchange, std::shared_ptr<Gloo> gloo)
    : c10d::Backend(gloo->backend()->getRank(), gloo->backend()->getSize()),
      exchange_(std::move(exchange)),
      gloo_(std::move(gloo)) {}

c10d::Backend& SharedMemory::prepare(const Call& call) {
  constexpr std::array kShared{OpType::ALLREDUCE, OpType::ALLGATHER, OpType::_ALLGATHER_BASE,
                               OpType::BROADCAST, OpType::BARRIER};
  if (std::ranges::count(kShared, call.type) == 0) return gloo_->prepare(call);
  tag_ = tag_of(call);
  return *this;
}

void SharedMemory::set_timeout(std::chrono::milliseconds timeout) {
  timeout_ = timeout;
  gloo_->set_timeout(timeout);
}

void SharedMemory::abort() {
  exchange_->abort();
  gloo_->abort();
}

void SharedMemory::shutdown() {
  exchange_->stop();
  gloo_->shutdown();
}

SharedMemory::WorkPtr SharedMemory::allreduce(Tensors& tensors,
                                              const c10d::AllreduceOptions& options) {
  const auto op = options.reduceOp.op_;
  const bool fits = tensors.size() == 1 && is_plain(tensors[0]);
  const Reduce reduce = fits ? find_reduce(tensors[0].scalar_type(), op) : nullptr;
  if (reduce == nullptr) return gloo_->with_tag(tag_).allreduce(tensors, options);
  return start(OpType::ALLREDUCE, make_all_reduce(tensors[0], reduce, op), options.timeout);
}

SharedMemory::WorkPtr SharedMemory::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& options) {
  const auto fits = [&](const at::Tensor& output) {
    return is_plain(output) && output.scalar_type() == inputs[0].scalar_type() &&
           output.numel() == inputs[0].numel();
  };
  if (inputs.size() != 1 || outputs.size() != 1 ||
      outputs[0].size() != static_cast<size_t>(size_) || !is_plain(inputs[0]) ||
      !std::all_of(outputs[0].begin(), outputs[0].end(), fits)) {
    return gloo_->with_tag(tag_).allgather(outputs, inputs, options);
  }
  return start(OpType::ALLGATHER, make_all_gather(outputs[0], inputs[0]), options.timeout);
}

SharedMemory::WorkPtr SharedMemory::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                    const c10d::AllgatherOptions& options) {
  if (!is_plain(input) || !is_plain(output) || !output.is_contiguous() ||
      output.scalar_type() != input.scalar_type() || output.numel() != input.numel() * size_) {
    return gloo_->with_tag(tag_)._allgather_base(output, input, options);
  }
  return start(OpType::_ALLGATHER_BASE,
               make_all_gather(output.view({size_, input.numel()}).unbind(), input),
               options.timeout);
}

SharedMemory::WorkPtr SharedMemory::broadcast(Tensors& tensors,
                                              const c10d::BroadcastOptions& options) {
  if (tensors.size() != 1 || !is_plain(tensors[0]) || options.rootTensor != 0 ||
      options.rootRank < 0 || options.rootRank >= size_) {
    return gloo_->with_tag(tag_).broadcast(tensors, options);
  }
  return start(OpType::BROADCAST, make_broadcast(tensors[0], static_cast<int>(options.rootRank)),
               options.timeout);
}

SharedMemory::WorkPtr SharedMemory::barrier(const c10d::BarrierOptions& options) {
  return start(OpType::BARRIER, make_barrier(), options.timeout);
}

SharedMemory::WorkPtr SharedMemory::start(OpType type, std::unique_ptr<Operation> operation,
                                          std::chrono::milliseconds timeout) {
  auto work = exchange_->start(type, tag_, std::move(operation), timeout_or_default(timeout));
  ++calls_;
  return work;
}

std::unique_ptr<Operation> SharedMemory::make_all_reduce(const at::Tensor& tensor, Reduce reduce,
                                                         c10d::ReduceOp::RedOpType op) {
  const Layout& layout = exchange_->layout();
  const int divisor = op == c10d::ReduceOp::AVG ? size_ : 1;
  const int64_t by_all =
      std::min(kMaxReducedByAll / size_, static_cast<int64_t>(layout.input_bytes()));
  if (bytes_of(tensor) <= by_all) return std::make_unique<AllReduceByAll>(tensor, reduce, divisor);
  return std::make_unique<AllReduceInParts>(layout, tensor, reduce, divisor);
}

std::unique_ptr<Operation> SharedMemory::make_all_gather(const Tensors& outputs,
                                                         const at::Tensor& input) {
  return std::make_unique<AllGather>(exchange_->layout(), outputs, input);
}

std::unique_ptr<Operation> SharedMemory::make_broadcast(const at::Tensor& tensor, int root) {
  return std::make_unique<Broadcast>(exchange_->layout(), tensor, root);
}

std::unique_ptr<Operation> SharedMemory::make_barrier() {
  return std::make_unique<Barrier>();
}

bool SharedMemory::gathers_in_one_hop(size_t bytes) const {
  // Upper bound on the bytes of all ranks together: each rank reads them all while the others wait.
  constexpr size_t kMaxBytes = size_t{256} << 10;
  return bytes <=
         std::min(kMaxBytes / static_cast<size_t>(size_), exchange_->layout().input_bytes());
}

void SharedMemory::gather_in_one_hop(const Call& call, const at::Tensor& all,
                                     std::chrono::milliseconds timeout,
                                     c10::function_ref<void()> started) {
  run(call, std::make_unique<GatherInPlace>(all), timeout, started);
}

at::Tensor SharedMemory::merge_in_tree(const Call& call, const at::Tensor& row, MergeRows merge,
                                       std::chrono::milliseconds timeout,
                                       c10::function_ref<void()> started) {
  run(call, std::make_unique<MergeInTree>(leaders(), exchange_->layout(), row, merge), timeout,
      started);
  return row;
}

/// Starts a call and waits for it.
void SharedMemory::run(const Call& call, std::unique_ptr<Operation> operation,
                       std::chrono::milliseconds timeout, c10::function_ref<void()> started) {
  const auto task =
      exchange_->begin(tag_of(call), std::move(operation), timeout_or_default(timeout));
  ++calls_;
  started();
  exchange_->wait(task, kNoTimeout);
}

}  // namespace syncbn::dist::detail::shm
