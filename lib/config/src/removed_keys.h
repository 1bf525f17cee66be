#pragma once

#include <algorithm>
#include <array>
#include <string_view>

namespace syncbn::config {

/// A key of former versions. Its former default is accepted in files, because the config.yaml of a
/// run contains every key.
struct RemovedKey {
  std::string_view path, former_default, advice;
};

/// Null if former versions had no such key.
inline const RemovedKey* removed_key(std::string_view path) {
  static constexpr std::array kRemoved = {
      RemovedKey{"cuda_graph", "false", "it was removed; leave it out: steps run without graphs"},
      RemovedKey{"nccl.peer_memory", "true",
                 "it was removed; leave it out: statistics go over NCCL"},
  };
  const auto* const found = std::ranges::find(kRemoved, path, &RemovedKey::path);
  return found == kRemoved.end() ? nullptr : found;
}

}  // namespace syncbn::config
