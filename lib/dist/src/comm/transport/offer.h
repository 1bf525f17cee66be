#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "transport/segment.h"
#include "transport/shared_memory.h"

namespace syncbn::dist::detail::shm {

/// What a rank can do for a group, said before Gloo connects its ranks. So whoever is connected
/// knows what all have said, and all come to the same decision without waiting for anybody.
class Offer {
 public:
  /// Nothing is said where this rank has no memory to offer.
  /// @param store the group's own part of the job's.
  static std::optional<Offer> make(c10d::Store& store, int rank, int size);

  /// Whether every rank of the group has made an offer, and of this version. Once Gloo has
  /// connected them.
  bool is_made_by_all(c10d::Store& store) const;

  /// Connects over Gloo one rank of each host: this one is number `host` of `hosts`.
  using ConnectHosts = std::function<c10::intrusive_ptr<c10d::Backend>(int host, int hosts)>;

  /// Looks which ranks can reach each other's memory; all of them take part.
  /// @param names the ranks in the world.
  /// @return null when none can, or not as on hosts: then none of the group uses it.
  std::unique_ptr<SharedMemory> accept(c10d::Backend& gloo, const std::vector<int>& names,
                                       const ConnectHosts& connect) &&;

 private:
  Offer(const Layout& layout, Segment own, int rank, int size);

  std::vector<Segment> open_all(c10d::Backend& gloo);

  Layout layout_;
  Segment own_;
  int rank_;
  int size_;
};

}  // namespace syncbn::dist::detail::shm
