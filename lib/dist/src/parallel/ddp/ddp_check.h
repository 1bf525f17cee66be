#pragma once

#include <optional>
#include <vector>

#include "ddp/ddp_module.h"

namespace syncbn::dist::detail {

/// Compares the options, and the tensors' names, shapes and types, between all ranks. Does nothing
/// in a group with Python ranks, where libtorch compares the parameters.
/// @throws base::UserError naming both ranks; base::UnavailableError when a peer fails.
void check_same_module(const DdpOptions& options, const std::vector<NamedTensor>& parameters,
                       const std::vector<NamedTensor>& buffers, const ProcessGroupPtr& group);

/// @return the device for inputs; nullopt for a module on several devices.
/// @throws base::UserError for different types of device, and for several with SyncBatchNorm.
std::optional<at::Device> check_devices(const std::vector<at::Device>& devices,
                                        bool has_sync_batch_norm);

/// @param accumulators of the parameters, at the time of wrapping.
/// @throws base::UserError if a parameter has another one now, because module.to() has removed the
///   reducer's hooks, or if a frozen parameter requires a gradient now.
void check_unchanged(const std::vector<NamedTensor>& parameters,
                     const std::vector<const torch::autograd::Node*>& accumulators,
                     const std::vector<NamedTensor>& frozen);

/// @throws base::UserError naming the parameters, if libtorch's message is that some got no
///   gradient in the step before.
void explain_unfinished_reduction(const std::string& message,
                                  const std::vector<NamedTensor>& parameters);

}  // namespace syncbn::dist::detail
