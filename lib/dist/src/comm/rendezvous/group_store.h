#pragma once

#include <fmt/format.h>

#include <string>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace syncbn::dist::detail {

// Keys as in Python's torch.distributed (2.11 to 2.15), so that its ranks and ours find each other.

inline constexpr char kDefaultGroupName[] = "0";

using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// The part of a store with the keys of one kind of device, or of one group.
inline StorePtr store_part(const StorePtr& store, const std::string& name) {
  return c10::make_intrusive<c10d::PrefixStore>(name + "/", store);
}

/// The part of the job's store in which a group connects. Those of later groups lie inside the
/// default group's.
inline StorePtr group_store(const StorePtr& store, const std::string& name) {
  const auto job = c10::make_intrusive<c10d::PrefixStore>("default_pg", store);
  const StorePtr first = store_part(job, kDefaultGroupName);
  return name == kDefaultGroupName ? first : store_part(first, name);
}

/// The key under which Gloo stores how to reach a rank of the default group. A Python rank sets it
/// when it arrives, ours only after all ranks have arrived.
inline std::string gloo_key(int rank) {
  // PrefixStore adds another slash; "0" is Gloo's first mesh.
  return fmt::format("default_pg/{}//cpu//0/{}", kDefaultGroupName, rank);
}

}  // namespace syncbn::dist::detail
