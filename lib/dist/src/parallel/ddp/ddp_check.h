#pragma once

#include <optional>
#include <vector>

#include "ddp/ddp_module.h"

namespace syncbn::dist::detail {

/// Every rank learns whether the options are the same on all ranks, and whether the tensors have
/// the same names, shapes and types on all ranks, and which one has not. Does nothing in a group
/// with ranks that are not ours, where libtorch compares the parameters.
/// @throws base::UserError naming the first difference and both ranks; base::UnavailableError when
///   a peer fails.
void check_same_module(const DdpOptions& options, const std::vector<NamedTensor>& parameters,
                       const std::vector<NamedTensor>& buffers, const ProcessGroupPtr& group);

/// Whether a module on these devices can be wrapped, and the one for its inputs: none when there
/// are several.
/// @throws base::UserError for devices of different types, and for several with SyncBatchNorm.
std::optional<at::Device> check_devices(const std::vector<at::Device>& devices,
                                        bool has_sync_batch_norm);

/// @param accumulators of the parameters, when they were wrapped.
/// @throws base::UserError when one has another since: after module.to(), the engine's hooks are
///   gone.
void check_still_wrapped(const std::vector<NamedTensor>& parameters,
                         const std::vector<const torch::autograd::Node*>& accumulators);

/// When libtorch's complaint is that parameters got no gradient in the former step, says which.
/// @throws base::UserError then; otherwise returns.
void explain_unfinished_reduction(const std::string& complaint,
                                  const std::vector<NamedTensor>& parameters);

/// @throws base::UserError naming the first that requires a gradient after all.
void check_still_frozen(const std::vector<NamedTensor>& frozen);

}  // namespace syncbn::dist::detail
