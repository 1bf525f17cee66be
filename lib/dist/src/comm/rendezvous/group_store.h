#pragma once

#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace syncbn::dist::detail {

// The store's layout is that of Python's torch.distributed (2.11 to 2.15): so its ranks and ours
// find each other.

/// The name that the first group has.
inline constexpr char kDefaultGroupName[] = "0";

/// The part of the job's store in which a group connects. Groups made later are inside the default
/// group's part.
c10::intrusive_ptr<c10d::Store> group_store(const c10::intrusive_ptr<c10d::Store>& store,
                                            const std::string& name);

/// The part of a group's store for one kind of device: "cpu" or "cuda".
c10::intrusive_ptr<c10d::Store> device_store(const c10::intrusive_ptr<c10d::Store>& group,
                                             const std::string& device);

/// The key under which Gloo says how to reach a rank of the default group. A rank of Python's does
/// that as soon as it has come, one of ours only when all are there.
std::string gloo_key(int rank);

}  // namespace syncbn::dist::detail
