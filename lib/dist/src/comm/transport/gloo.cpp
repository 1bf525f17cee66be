#include "transport/gloo.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "transport/no_sigpipe.h"

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
                                            int world_size,
                                            const std::vector<std::string>& addresses,
                                            std::chrono::milliseconds timeout) {
  using Gloo = c10d::ProcessGroupGloo;
  const NoSigpipe threads_inherit_it;
  auto options = Gloo::Options::create(timeout);
  options->devices.clear();
  for (const std::string& address : addresses) {
    options->devices.push_back(Gloo::createDeviceForHostname(address, /*lazyInit=*/false));
  }
  // Never two where Python has one: it answers in one mesh only.
  if (addresses.empty()) options->devices.push_back(Gloo::createDefaultDevice(/*lazyInit=*/false));
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
