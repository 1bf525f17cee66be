#include "rendezvous/group_store.h"

#include <fmt/format.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace syncbn::dist::detail {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

StorePtr prefixed(const std::string& prefix, const StorePtr& store) {
  return c10::make_intrusive<c10d::PrefixStore>(prefix, store);
}

}  // namespace

StorePtr group_store(const StorePtr& store, const std::string& name) {
  const StorePtr first =
      prefixed(std::string(kDefaultGroupName) + "/", prefixed("default_pg", store));
  return name == kDefaultGroupName ? first : prefixed(name + "/", first);
}

StorePtr device_store(const StorePtr& group, const std::string& device) {
  return prefixed(device + "/", group);
}

std::string gloo_key(int rank) {
  // PrefixStore adds a slash of its own; Gloo's first mesh is "0".
  return fmt::format("default_pg/{}//cpu//0/{}", kDefaultGroupName, rank);
}

}  // namespace syncbn::dist::detail
