#include "transport/operations.h"

#include <algorithm>
#include <utility>

#include "transport/dense.h"

namespace syncbn::dist::detail::shm {
namespace {

// Upper bound on the bytes of all ranks together that every rank reduces by itself: one step
// instead of two, and every rank computes every sum.
constexpr int64_t kMaxReducedByAll = int64_t{128} << 10;
constexpr int64_t kCacheLine = 64;

int64_t divide_up(int64_t value, int64_t by) {
  return (value + by - 1) / by;
}

/// Small tensors: every rank reduces all of it.
class AllReduceByAll : public Operation {
 public:
  AllReduceByAll(const at::Tensor& tensor, Reduce reduce, int divisor)
      : values_(tensor), reduce_(reduce), divisor_(divisor) {}

  void publish(const Step& step) override {
    copy_bytes(step.input(step.rank), values_.data(), values_.bytes());
  }
  void consume(const Step& step) override {
    c10::SmallVector<const void*, 16> inputs;
    for (int rank = 0; rank < step.ranks(); ++rank) inputs.push_back(step.input(rank));
    reduce_(values_.data(), inputs.data(), step.ranks(), values_.bytes() / values_.element_size(),
            divisor_);
  }
  void finish() override { values_.write_back(); }
  std::vector<at::Tensor> result() const override { return {values_.tensor()}; }

 private:
  const Dense values_;
  const Reduce reduce_;
  const int divisor_;
};

/// Large tensors: each rank reduces one part of each chunk, for all ranks. A step distributes the
/// results of one chunk and publishes the next.
class AllReduceInParts : public Operation {
 public:
  AllReduceInParts(const Layout& layout, const at::Tensor& tensor, Reduce reduce, int divisor)
      : values_(tensor), chunks_(values_.bytes(), layout), reduce_(reduce), divisor_(divisor) {}

  int64_t steps() const override { return chunks_.count() + 1; }

  void publish(const Step& step) override {
    if (step.number == chunks_.count()) return;
    for (int rank = 0; rank < step.ranks(); ++rank) {
      if (rank == step.rank) continue;
      const Chunk part = part_of(step.number, rank, step.ranks());
      copy_bytes(step.input(step.rank) + part.begin - chunks_.at(step.number).begin,
                 values_.data() + part.begin, part.bytes);
    }
  }

  void consume(const Step& step) override {
    if (step.number > 0) consume_results(step);
    if (step.number < chunks_.count()) reduce_part(step);
  }

  void finish() override { values_.write_back(); }
  std::vector<at::Tensor> result() const override { return {values_.tensor()}; }

 private:
  /// The part of a chunk that a rank reduces; empty where there are not enough.
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
      copy_bytes(values_.data() + part.begin, step.result(rank), part.bytes);
    }
  }

  void reduce_part(const Step& step) const {
    const Chunk part = part_of(step.number, step.rank, step.ranks());
    c10::SmallVector<const void*, 16> inputs;
    for (int rank = 0; rank < step.ranks(); ++rank) {
      inputs.push_back(rank == step.rank
                           ? values_.data() + part.begin
                           : step.input(rank) + part.begin - chunks_.at(step.number).begin);
    }
    reduce_(values_.data() + part.begin, inputs.data(), step.ranks(),
            part.bytes / values_.element_size(), divisor_);
    copy_bytes(step.next_result(), values_.data() + part.begin, part.bytes);
  }

  const Dense values_;
  const Chunks chunks_;
  const Reduce reduce_;
  const int divisor_;
};

class AllGather : public Operation {
 public:
  AllGather(const Layout& layout, std::vector<at::Tensor> outputs, const at::Tensor& input)
      : input_(input), chunks_(input_.bytes(), layout), given_(std::move(outputs)) {
    for (const at::Tensor& output : given_) outputs_.emplace_back(output);
  }

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
  void finish() override {
    for (const Dense& output : outputs_) output.write_back();
  }
  std::vector<at::Tensor> result() const override { return given_; }

 private:
  const Dense input_;
  const Chunks chunks_;
  const std::vector<at::Tensor> given_;
  std::vector<Dense> outputs_;
};

class GatherInPlace : public Operation {
 public:
  explicit GatherInPlace(const at::Tensor& all)
      : all_(all),
        first_(static_cast<std::byte*>(all.mutable_data_ptr())),
        bytes_(bytes_of(all) / all.size(0)) {}

  void publish(const Step& step) override {
    copy_bytes(step.input(step.rank), row(step.rank), bytes_);
  }
  void consume(const Step& step) override {
    for (int rank = 0; rank < step.ranks(); ++rank) {
      if (rank != step.rank) copy_bytes(row(rank), step.input(rank), bytes_);
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
  Broadcast(const Layout& layout, const at::Tensor& tensor, int root)
      : values_(tensor), chunks_(values_.bytes(), layout), root_(root) {}

  int64_t steps() const override { return chunks_.count(); }

  void publish(const Step& step) override {
    if (step.rank != root_) return;
    const Chunk part = chunks_.at(step.number);
    copy_bytes(step.input(root_), values_.data() + part.begin, part.bytes);
  }
  void consume(const Step& step) override {
    if (step.rank == root_) return;
    const Chunk part = chunks_.at(step.number);
    copy_bytes(values_.data() + part.begin, step.input(root_), part.bytes);
  }
  void finish() override { values_.write_back(); }
  std::vector<at::Tensor> result() const override { return {values_.tensor()}; }

 private:
  const Dense values_;
  const Chunks chunks_;
  const int root_;
};

class Barrier : public Operation {
 public:
  void publish(const Step& /*step*/) override {}
  void consume(const Step& /*step*/) override {}
  std::vector<at::Tensor> result() const override { return {}; }
};

}  // namespace

std::unique_ptr<Operation> all_reduce(const Layout& layout, int ranks, const at::Tensor& tensor,
                                      Reduce reduce, int divisor) {
  const int64_t by_all =
      std::min(kMaxReducedByAll / ranks, static_cast<int64_t>(layout.input_bytes()));
  if (bytes_of(tensor) <= by_all) return std::make_unique<AllReduceByAll>(tensor, reduce, divisor);
  return std::make_unique<AllReduceInParts>(layout, tensor, reduce, divisor);
}

std::unique_ptr<Operation> all_gather(const Layout& layout, std::vector<at::Tensor> outputs,
                                      const at::Tensor& input) {
  return std::make_unique<AllGather>(layout, std::move(outputs), input);
}

std::unique_ptr<Operation> gather_in_place(const at::Tensor& all) {
  return std::make_unique<GatherInPlace>(all);
}

std::unique_ptr<Operation> broadcast(const Layout& layout, const at::Tensor& tensor, int root) {
  return std::make_unique<Broadcast>(layout, tensor, root);
}

std::unique_ptr<Operation> barrier() {
  return std::make_unique<Barrier>();
}

}  // namespace syncbn::dist::detail::shm
