#include "common/visible_gpu.h"

#include <fmt/format.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/gpus.h>
#include <syncbn/base/text.h>

#include <cstdlib>
#include <limits>
#include <string>

namespace syncbn::train {

void see_only_gpu(int64_t index) {
  constexpr const char* kVariable = "CUDA_VISIBLE_DEVICES";
  const char* const visible = std::getenv(kVariable);
  if (const int gpus = base::count_gpus(/*virtual_local_rank=*/true); index >= gpus) {
    throw base::UserError(fmt::format(
        "device: cuda:{}, but {} {}", index,
        visible == nullptr ? "this host has" : fmt::format("{}={} shows", kVariable, visible),
        gpus == 0 ? "no GPU; device=cpu trains on the CPU"
                  : fmt::format("only {}; the first is cuda:0", base::counted(gpus, "GPU"))));
  }
  const int64_t ranks =
      base::env_int("LOCAL_WORLD_SIZE", 1, std::numeric_limits<int>::max()).value_or(1);
  if (ranks > 1) {
    throw base::UserError(
        fmt::format("device: cuda:{} is one GPU, and this host has {} ranks; device: cuda gives "
                    "each rank its own",
                    index, ranks));
  }
  const std::string name = base::visible_gpu(static_cast<int>(index));
  ::setenv(kVariable, name.c_str(), /*overwrite=*/1);
}

}  // namespace syncbn::train
