#include "gloo.h"

#include <syncbn/base/env.h>

#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "no_sigpipe.h"

namespace syncbn::dist::detail {
namespace {

class TaggedGloo : public c10d::ProcessGroupGloo {
 public:
  using c10d::ProcessGroupGloo::ProcessGroupGloo;
  void set_next_tag(uint32_t tag) { collectiveCounter_ = tag; }
  /// One for each device, chosen by tag.
  size_t meshes() const { return contexts_.size(); }
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_gloo(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                            int world_size, const std::string& address,
                                            std::chrono::milliseconds timeout) {
  const NoSigpipe threads_inherit_it;
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
  return c10::make_intrusive<TaggedGloo>(store, rank, world_size, options);
}

void set_next_tag(c10d::Backend& gloo, uint32_t tag) {
  static_cast<TaggedGloo&>(gloo).set_next_tag(tag);
}

// Gloo has no such function, but closes all connections of a mesh when one wait exceeds its
// timeout. So this waits for a message that never comes. Where a connection is closed already, the
// attempt fails at once, and the next one does it.
void break_off(c10d::Backend& gloo) {
  const int meshes = static_cast<int>(static_cast<TaggedGloo&>(gloo).meshes());
  for (int peer = 0; peer < gloo.getSize(); ++peer) {
    if (peer == gloo.getRank()) continue;
    for (int tag = kReservedTags; tag < kReservedTags + meshes; ++tag) {
      std::vector<at::Tensor> nothing{at::empty({1}, at::kByte)};
      try {
        gloo.recv(nothing, peer, tag)->wait(std::chrono::milliseconds(1));
      } catch (const std::exception&) {  // as intended
      }
    }
  }
}

}  // namespace syncbn::dist::detail
