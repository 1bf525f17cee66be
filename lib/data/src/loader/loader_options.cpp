#include "loader/loader_options.h"

#include <ATen/Context.h>
#include <fmt/format.h>

#include <mutex>

#include <syncbn/base/error.h>
#include <syncbn/base/log.h>
#include <syncbn/base/text.h>

namespace syncbn::data::detail {

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

void check(const LoaderOptions& options) {
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
  static std::once_flag said;
  std::call_once(said, [] { spdlog::warn("pin_memory changes nothing: there is no GPU"); });
  return false;
}

}  // namespace syncbn::data::detail
