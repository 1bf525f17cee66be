#pragma once

#include <optional>
#include <string>

#include "rendezvous/backend_choice.h"

namespace syncbn::dist::detail {

/// What this rank offers, and the GPU that it would use.
struct OwnGpu {
  Offer offer;    ///< without the rank
  int index = 0;  ///< among the GPUs that this process sees
};

/// Loads the GPU library unless the backend is gloo or there is no GPU.
///
/// A process that sees one GPU uses that, as srun's --gpus-per-task=1 means it. Others use the one
/// of their local rank.
/// @param backend of InitOptions.
/// @param index of the GPU, where the caller has chosen one.
/// @throws base::UserError for an unknown backend, if there is no GPU for one that needs it, or if
/// the
///   GPU is older than those that this library was built for.
OwnGpu find_own_gpu(const std::string& backend, std::optional<int> index = std::nullopt);

}  // namespace syncbn::dist::detail
