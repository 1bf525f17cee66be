#include "common/visible_gpu.h"

#include <fmt/format.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

#include <cstdlib>
#include <limits>
#include <sstream>
#include <string>

namespace syncbn::train {

void see_only_gpu(int64_t index) {
  constexpr const char* kVariable = "CUDA_VISIBLE_DEVICES";
  const int64_t ranks =
      base::env_int("LOCAL_WORLD_SIZE", 1, std::numeric_limits<int>::max()).value_or(1);
  if (ranks > 1) {
    throw base::UserError(
        fmt::format("device: cuda:{} is one GPU, and this host has {} ranks; device: cuda gives "
                    "each rank its own",
                    index, ranks));
  }
  std::string name = std::to_string(index);
  if (const char* const visible = std::getenv(kVariable)) {  // empty: it hides all
    std::istringstream names{std::string(visible)};
    for (int64_t i = 0; i <= index; ++i) {
      if (std::getline(names, name, ',')) continue;
      throw base::UserError(fmt::format("device: cuda:{}, but {}={} shows only {}", index,
                                        kVariable, visible, base::counted(i, "GPU")));
    }
  }
  ::setenv(kVariable, name.c_str(), /*overwrite=*/1);
}

}  // namespace syncbn::train
