#include "transport/operations.h"

#include <algorithm>
#include <utility>

#include "transport/dense.h"

namespace syncbn::dist::detail::shm {
namespace {

// Up to so many bytes of all ranks together each rank reduces all by itself: one step instead of
// two, and every sum worked out by all.
constexpr int64_t kReducedByAll = int64_t{128} << 10;
constexpr int64_t kCacheLine = 64;

int64_t divide_up(int64_t value, int64_t by) {
  return (value + by - 1) / by;
}

Chunks chunks_of(const Setting& setting, const at::Tensor& tensor) {
  return {bytes_of(tensor), static_cast<int64_t>(setting.layout.input_bytes())};
}

/// Small tensors: every rank reduces all of it.
class AllReduceByAll : public Operation {
 public:
  AllReduceByAll(const at::Tensor& tensor, Reduce reduce, int divisor)
      : values_(tensor), reduce_(reduce), divisor_(divisor) {}

  void put(int64_t /*step*/, const Slots& slots) override {
    copy_bytes(slots.input(slots.rank()), values_.data(), values_.bytes());
  }
  void take(int64_t /*step*/, const Slots& slots) override {
    c10::SmallVector<const void*, 16> inputs;
    for (int rank = 0; rank < slots.ranks(); ++rank) inputs.push_back(slots.input(rank));
    reduce_(values_.data(), inputs.data(), slots.ranks(), values_.bytes() / values_.element_size(),
            divisor_);
  }
  void finish() override { values_.write_back(); }
  std::vector<at::Tensor> result() const override { return {values_.tensor()}; }

 private:
  const Dense values_;
  const Reduce reduce_;
  const int divisor_;
};

/// Large ones: of each chunk every rank reduces one part, for all. While the results of one chunk
/// go out, the next one comes in.
class AllReduceInParts : public Operation {
 public:
  AllReduceInParts(const Setting& setting, const at::Tensor& tensor, Reduce reduce, int divisor)
      : chunks_(chunks_of(setting, tensor)), values_(tensor), reduce_(reduce), divisor_(divisor) {}

  int64_t steps() const override { return chunks_.count() + 1; }

  void put(int64_t step, const Slots& slots) override {
    if (step == chunks_.count()) return;
    for (int rank = 0; rank < slots.ranks(); ++rank) {
      if (rank == slots.rank()) continue;
      const Chunk part = part_of(step, rank, slots.ranks());
      copy_bytes(slots.input(slots.rank()) + part.begin - chunks_.at(step).begin,
                 values_.data() + part.begin, part.bytes);
    }
  }

  void take(int64_t step, const Slots& slots) override {
    if (step > 0) take_results(step - 1, slots);
    if (step < chunks_.count()) reduce_part(step, slots);
  }

  void finish() override { values_.write_back(); }
  std::vector<at::Tensor> result() const override { return {values_.tensor()}; }

 private:
  /// The part of a chunk that a rank reduces; empty where there are not enough.
  Chunk part_of(int64_t step, int rank, int ranks) const {
    const Chunk whole = chunks_.at(step);
    const int64_t bytes = divide_up(divide_up(whole.bytes, ranks), kCacheLine) * kCacheLine;
    const int64_t begin = std::min(rank * bytes, whole.bytes);
    return {whole.begin + begin, std::min(bytes, whole.bytes - begin)};
  }

  void take_results(int64_t step, const Slots& slots) const {
    for (int rank = 0; rank < slots.ranks(); ++rank) {
      if (rank == slots.rank()) continue;
      const Chunk part = part_of(step, rank, slots.ranks());
      copy_bytes(values_.data() + part.begin, slots.result(rank), part.bytes);
    }
  }

  void reduce_part(int64_t step, const Slots& slots) const {
    const Chunk part = part_of(step, slots.rank(), slots.ranks());
    c10::SmallVector<const void*, 16> inputs;
    for (int rank = 0; rank < slots.ranks(); ++rank) {
      inputs.push_back(rank == slots.rank()
                           ? values_.data() + part.begin
                           : slots.input(rank) + part.begin - chunks_.at(step).begin);
    }
    reduce_(values_.data() + part.begin, inputs.data(), slots.ranks(),
            part.bytes / values_.element_size(), divisor_);
    copy_bytes(slots.next_result(), values_.data() + part.begin, part.bytes);
  }

  const Chunks chunks_;
  const Dense values_;
  const Reduce reduce_;
  const int divisor_;
};

class AllGather : public Operation {
 public:
  AllGather(const Setting& setting, std::vector<at::Tensor> outputs, const at::Tensor& input)
      : chunks_(chunks_of(setting, input)), input_(input), given_(std::move(outputs)) {
    for (const at::Tensor& output : given_) outputs_.emplace_back(output);
  }

  int64_t steps() const override { return chunks_.count(); }

  void put(int64_t step, const Slots& slots) override {
    const Chunk part = chunks_.at(step);
    copy_bytes(slots.input(slots.rank()), input_.data() + part.begin, part.bytes);
  }
  void take(int64_t step, const Slots& slots) override {
    const Chunk part = chunks_.at(step);
    for (int rank = 0; rank < slots.ranks(); ++rank) {
      copy_bytes(outputs_[static_cast<size_t>(rank)].data() + part.begin, slots.input(rank),
                 part.bytes);
    }
  }
  void finish() override {
    for (const Dense& output : outputs_) output.write_back();
  }
  std::vector<at::Tensor> result() const override { return given_; }

 private:
  const Chunks chunks_;
  const Dense input_;
  const std::vector<at::Tensor> given_;
  std::vector<Dense> outputs_;
};

class GatherInPlace : public Operation {
 public:
  explicit GatherInPlace(const at::Tensor& all)
      : all_(all),
        first_(static_cast<std::byte*>(all.mutable_data_ptr())),
        bytes_(bytes_of(all) / all.size(0)) {}

  void put(int64_t /*step*/, const Slots& slots) override {
    copy_bytes(slots.input(slots.rank()), row(slots.rank()), bytes_);
  }
  void take(int64_t /*step*/, const Slots& slots) override {
    for (int rank = 0; rank < slots.ranks(); ++rank) {
      if (rank != slots.rank()) copy_bytes(row(rank), slots.input(rank), bytes_);
    }
  }
  std::vector<at::Tensor> result() const override { return {all_}; }

 private:
  std::byte* row(int rank) const { return first_ + rank * bytes_; }

  const at::Tensor all_;
  std::byte* const first_;
  const int64_t bytes_;  ///< of a row
};

class Broadcast : public Operation {
 public:
  Broadcast(const Setting& setting, const at::Tensor& tensor, int root)
      : chunks_(chunks_of(setting, tensor)), values_(tensor), root_(root) {}

  int64_t steps() const override { return chunks_.count(); }

  void put(int64_t step, const Slots& slots) override {
    const Chunk part = chunks_.at(step);
    if (slots.rank() == root_)
      copy_bytes(slots.input(root_), values_.data() + part.begin, part.bytes);
  }
  void take(int64_t step, const Slots& slots) override {
    const Chunk part = chunks_.at(step);
    if (slots.rank() != root_)
      copy_bytes(values_.data() + part.begin, slots.input(root_), part.bytes);
  }
  void finish() override { values_.write_back(); }
  std::vector<at::Tensor> result() const override { return {values_.tensor()}; }

 private:
  const Chunks chunks_;
  const Dense values_;
  const int root_;
};

class Barrier : public Operation {
 public:
  void put(int64_t /*step*/, const Slots& /*slots*/) override {}
  void take(int64_t /*step*/, const Slots& /*slots*/) override {}
  std::vector<at::Tensor> result() const override { return {}; }
};

}  // namespace

std::unique_ptr<Operation> all_reduce(const Setting& setting, const at::Tensor& tensor,
                                      Reduce reduce, int divisor) {
  const int64_t by_all =
      std::min(kReducedByAll / setting.ranks, static_cast<int64_t>(setting.layout.input_bytes()));
  if (bytes_of(tensor) <= by_all) return std::make_unique<AllReduceByAll>(tensor, reduce, divisor);
  return std::make_unique<AllReduceInParts>(setting, tensor, reduce, divisor);
}

std::unique_ptr<Operation> all_gather(const Setting& setting, std::vector<at::Tensor> outputs,
                                      const at::Tensor& input) {
  return std::make_unique<AllGather>(setting, std::move(outputs), input);
}

std::unique_ptr<Operation> gather_in_place(const at::Tensor& all) {
  return std::make_unique<GatherInPlace>(all);
}

std::unique_ptr<Operation> broadcast(const Setting& setting, const at::Tensor& tensor, int root) {
  return std::make_unique<Broadcast>(setting, tensor, root);
}

std::unique_ptr<Operation> barrier() {
  return std::make_unique<Barrier>();
}

}  // namespace syncbn::dist::detail::shm
