#include "loader/checks.h"

#include <ATen/Context.h>
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <mutex>

#include <syncbn/base/cpus.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/log.h>
#include <syncbn/base/text.h>

namespace syncbn::data {

int automatic_workers() {
  constexpr int kMaxRanks = 1 << 16;
  const auto ranks = base::env_int("LOCAL_WORLD_SIZE", 1, kMaxRanks).value_or(1);
  return std::max(base::cpus_of_rank(static_cast<int>(ranks)) - 1, 1);
}

namespace detail {
namespace {

[[noreturn]] void refuse(const std::string& why) {
  throw base::UserError("cannot go on at the saved place in the data: " + why);
}

}  // namespace

int64_t choose_batch_size(const LoaderOptions& options, int num_replicas) {
  if (options.batch_size && options.global_batch_size) {
    throw base::UserError(
        fmt::format("batch_size {} (of each rank) and global_batch_size {} (of all) were both "
                    "given; give one of them",
                    *options.batch_size, *options.global_batch_size));
  }
  const int64_t all = options.global_batch_size.value_or(num_replicas);
  if (options.global_batch_size && (all < 1 || all % num_replicas != 0)) {
    throw base::UserError(fmt::format("global_batch_size {} is not a multiple of the {}", all,
                                      base::counted(num_replicas, "rank")));
  }
  const int64_t own = options.batch_size.value_or(all / num_replicas);
  if (own < 1) throw base::UserError(fmt::format("batch_size must be at least 1, got {}", own));
  return own;
}

void check_ranges(const LoaderOptions& options) {
  if (options.num_workers < kAutoWorkers) {
    throw base::UserError(
        fmt::format("num_workers must be at least 0, got {}", options.num_workers));
  }
  if (options.prefetch < 1) {
    throw base::UserError(fmt::format("prefetch must be at least 1, got {}", options.prefetch));
  }
  if (options.error_budget < 0 || options.error_budget > 1) {
    throw base::UserError(
        fmt::format("error_budget must be from 0 to 1, got {}", options.error_budget));
  }
}

bool pins_memory(const LoaderOptions& options) {
  if (!options.pin_memory) return false;
  if (at::hasCUDA()) return true;
  static std::once_flag warned;
  std::call_once(warned, [] { spdlog::warn("pin_memory changes nothing: there is no GPU"); });
  return false;
}

void check_resumable(const SamplerState& state, const Dataset& dataset, const Sampler& sampler,
                     int64_t num_samples) {
  if (state.version < 1 || state.version > SamplerState::kVersion) {
    refuse(fmt::format("it was saved in format {}, this program reads formats 1 to {}",
                       state.version, SamplerState::kVersion));
  }
  if (std::bit_cast<uint64_t>(state.fingerprint) != dataset.fingerprint()) {
    refuse("the data set is not the one it was saved with");
  }
  if (state.seed != sampler.seed()) {
    refuse(
        fmt::format("it was saved with seed {}, this run has seed {}", state.seed, sampler.seed()));
  }
  // A new epoch may begin in any order.
  const std::string order = sampler.order_name();
  if (state.consumed != 0 && !state.order.empty() && state.order != order) {
    refuse(fmt::format(
        "it is in the middle of an epoch in the order '{}', this run's is '{}'; set the sampler "
        "back, or go on from the beginning of an epoch",
        state.order, order.empty() ? "unknown" : order));
  }
  const int64_t replicas = sampler.num_replicas();
  if (state.consumed < 0 || state.consumed % replicas != 0 ||
      state.consumed / replicas > num_samples) {
    refuse(fmt::format("the place after {} of the epoch does not fit {} with {} each",
                       base::counted(state.consumed, "sample"), base::counted(replicas, "rank"),
                       base::counted(num_samples, "sample")));
  }
}

}  // namespace detail
}  // namespace syncbn::data
