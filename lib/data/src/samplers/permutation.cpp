#include "samplers/permutation.h"

// at::detail::createCPUGenerator.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randperm.h>
#include <fmt/format.h>

#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

namespace syncbn::data {

std::vector<int64_t> permutation(int64_t size, int64_t seed, int64_t epoch) {
  // Unsigned, so that a negative seed wraps as it does in torch.Generator.manual_seed.
  const uint64_t sum = static_cast<uint64_t>(seed) + static_cast<uint64_t>(epoch);
  const at::Tensor order = at::randperm(size, at::detail::createCPUGenerator(sum), at::kLong);
  const auto* first = order.const_data_ptr<int64_t>();
  return {first, first + size};
}

int64_t share_of(int64_t size, int num_replicas, bool drop_last) {
  // With drop_last PyTorch says ceil((N - W) / W) for an uneven N, which is floor(N / W).
  return size / num_replicas + (!drop_last && size % num_replicas != 0 ? 1 : 0);
}

std::vector<int64_t> deal(std::span<const int64_t> list, int num_replicas, int rank,
                          int64_t count) {
  std::vector<int64_t> mine;
  mine.reserve(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    mine.push_back(list[static_cast<size_t>((rank + i * num_replicas) % std::ssize(list))]);
  }
  return mine;
}

void check_rank(int num_replicas, int rank) {
  if (num_replicas >= 1 && rank >= 0 && rank < num_replicas) return;
  throw base::UserError(fmt::format(
      "a sampler was made for rank {} of {}; ranks count from 0 to one below their number", rank,
      base::counted(num_replicas, "rank")));
}

}  // namespace syncbn::data
