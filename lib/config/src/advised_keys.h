#pragma once

#include <algorithm>
#include <array>
#include <string_view>

namespace syncbn::config {

/// A key of former versions, or one that other programs have. The former default is accepted in
/// files, because the config.yaml of a run contains every key.
struct AdvisedKey {
  std::string_view path, former_default, advice;
};

/// Null without advice on the key.
inline const AdvisedKey* advised_key(std::string_view path) {
  static constexpr std::array kKeys = {
      AdvisedKey{"cuda_graph", "false", "it was removed; leave it out: steps run without graphs"},
      AdvisedKey{"nccl.peer_memory", "true",
                 "it was removed; leave it out: statistics go over NCCL"},
      AdvisedKey{"model.num_classes", "",
                 "the number of classes comes from the data; leave it out"},
      AdvisedKey{"model.pretrained", "",
                 "leave it out; to begin with trained weights, write init: FILE"},
  };
  const auto* const found = std::ranges::find(kKeys, path, &AdvisedKey::path);
  return found == kKeys.end() ? nullptr : found;
}

}  // namespace syncbn::config
