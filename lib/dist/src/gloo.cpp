#include "gloo.h"

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

namespace syncbn::dist::detail {

c10::intrusive_ptr<c10d::Backend> make_gloo(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                            int world_size,
                                            const std::vector<std::string>& addresses,
                                            std::chrono::milliseconds timeout) {
  using Gloo = c10d::ProcessGroupGloo;
  auto options = Gloo::Options::create(timeout);
  options->devices.clear();
  for (const std::string& address : addresses) {
    options->devices.push_back(Gloo::createDeviceForHostname(address, /*lazyInit=*/false));
  }
  // Never two where Python has one: it answers in one mesh only.
  if (addresses.empty()) options->devices.push_back(Gloo::createDefaultDevice(/*lazyInit=*/false));
  return c10::make_intrusive<Gloo>(store, rank, world_size, options);
}

}  // namespace syncbn::dist::detail
