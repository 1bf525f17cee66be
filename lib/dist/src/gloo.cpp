#include "gloo.h"

#include <syncbn/base/env.h>

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

namespace syncbn::dist::detail {

c10::intrusive_ptr<c10d::Backend> make_gloo(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                            int world_size, const std::string& address,
                                            std::chrono::milliseconds timeout) {
  // Exactly one device: with two, Gloo builds two meshes, and Python peers answer only one.
  auto options = c10d::ProcessGroupGloo::Options::create(timeout);
  options->devices.clear();
  if (const auto interface = base::env("GLOO_SOCKET_IFNAME")) {
    options->devices.push_back(
        c10d::ProcessGroupGloo::createDeviceForInterface(*interface, /*lazyInit=*/false));
  } else {
    options->devices.push_back(
        c10d::ProcessGroupGloo::createDeviceForHostname(address, /*lazyInit=*/false));
  }
  return c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, world_size, options);
}

}  // namespace syncbn::dist::detail
