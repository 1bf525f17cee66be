#include "samplers/order.h"

// at::detail::createCPUGenerator.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randperm.h>
#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

namespace syncbn::data {

std::vector<int64_t> epoch_order(int64_t size, bool shuffle, int64_t seed, int64_t epoch) {
  std::vector<int64_t> order(static_cast<size_t>(size));
  if (!shuffle) {
    std::iota(order.begin(), order.end(), 0);
    return order;
  }
  const at::Tensor permutation =
      at::randperm(size, at::detail::createCPUGenerator(generator_seed(seed, epoch)), at::kLong);
  std::copy_n(permutation.const_data_ptr<int64_t>(), size, order.begin());
  return order;
}

int64_t samples_per_rank(int64_t size, int num_replicas, bool drop_last) {
  // With drop_last PyTorch computes ceil((N - W) / W) for an uneven N, which is floor(N / W).
  return size / num_replicas + (!drop_last && size % num_replicas != 0 ? 1 : 0);
}

std::vector<int64_t> shard_of(std::span<const int64_t> list, int num_replicas, int rank,
                              int64_t count) {
  std::vector<int64_t> shard;
  shard.reserve(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    shard.push_back(list[static_cast<size_t>((rank + i * num_replicas) % std::ssize(list))]);
  }
  return shard;
}

void check_shard(int64_t size, int num_replicas, int rank) {
  if (num_replicas < 1 || rank < 0 || rank >= num_replicas) {
    throw base::UserError(
        fmt::format("a sampler was made for rank {} of {}; ranks are numbered from 0", rank,
                    base::counted(num_replicas, "rank")));
  }
  if (size < 0) throw base::UserError(fmt::format("a data set cannot have {} samples", size));
}

}  // namespace syncbn::data
