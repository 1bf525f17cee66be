#include "permutation.h"

// at::detail::createCPUGenerator.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randperm.h>
#include <fmt/format.h>

#include <syncbn/base/error.h>

namespace syncbn::data {

at::Generator epoch_generator(int64_t seed, int64_t epoch) {
  // Unsigned, so that a negative seed wraps as it does in torch.Generator.manual_seed.
  return at::detail::createCPUGenerator(static_cast<uint64_t>(seed) + static_cast<uint64_t>(epoch));
}

std::vector<int64_t> permutation(int64_t size, int64_t seed, int64_t epoch) {
  const at::Tensor order = at::randperm(size, epoch_generator(seed, epoch), at::kLong);
  const auto* first = order.const_data_ptr<int64_t>();
  return {first, first + size};
}

std::vector<int64_t> deal(const std::vector<int64_t>& order, int num_replicas, int rank) {
  std::vector<int64_t> mine;
  const size_t size = order.size();
  const auto replicas = static_cast<size_t>(num_replicas);
  mine.reserve((size + replicas - 1) / replicas);
  for (size_t begin = 0; begin < size; begin += replicas) {
    mine.push_back(order[(begin + static_cast<size_t>(rank)) % size]);
  }
  return mine;
}

void check_rank(int num_replicas, int rank) {
  if (num_replicas >= 1 && rank >= 0 && rank < num_replicas) return;
  throw base::UserError(fmt::format(
      "a sampler was made for rank {} of {} ranks; ranks count from 0 to one below their number",
      rank, num_replicas));
}

}  // namespace syncbn::data
