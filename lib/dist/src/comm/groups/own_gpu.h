#pragma once

#include <optional>
#include <string>

#include "rendezvous/backend_choice.h"

namespace syncbn::dist::detail {

/// What this rank offers in the choice of a backend, and the GPU that it would use.
struct OwnGpu {
  Offer offer;    ///< without the rank
  int index = 0;  ///< among the GPUs that this process sees
};

/// Loads the GPU library unless the backend is gloo or there is no GPU.
///
/// A process that sees one GPU uses that one, as srun's --gpus-per-task=1 intends. Others use the
/// GPU with the index of their local rank, with cuda:gloo modulo the number of GPUs.
/// @param backend of InitOptions.
/// @param index of the GPU, if the caller has chosen one.
/// @throws base::UserError for an unknown backend, if the backend needs a GPU and there is none for
///   this rank, or if the GPU is older than those for which this library was built.
OwnGpu find_own_gpu(const std::string& backend, std::optional<int> index = std::nullopt);

}  // namespace syncbn::dist::detail
