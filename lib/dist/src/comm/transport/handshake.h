#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "transport/gloo.h"
#include "transport/segment.h"

namespace syncbn::dist::detail::shm {

/// Chooses the transport of a group. Each rank writes to the store before Gloo connects the ranks.
/// Afterwards all ranks read the same entries, so they make the same choice without waiting.
class Handshake {
 public:
  /// Returns nullopt, and writes nothing to the store, if this rank cannot allocate a segment.
  /// @param store the group's part of the job's store.
  static std::optional<Handshake> start(c10d::Store& store, int rank, int size);

  /// Whether every rank started a handshake of this version. Call it after Gloo has connected them.
  bool is_started_by_all(c10d::Store& store) const;

  /// Connects the first ranks of all hosts over Gloo. @param host this host's index, below `hosts`.
  using ConnectHosts = std::function<std::shared_ptr<Gloo>(int host, int hosts)>;

  /// Finds out which ranks can reach each other's memory. All ranks call it.
  /// @param gloo connects all ranks. @param names the ranks in the world.
  /// @return SharedMemory if all ranks share one host; Hierarchical if there are several hosts and
  ///   one has two ranks or more; otherwise `gloo`.
  std::shared_ptr<Transport> finish(const std::shared_ptr<Gloo>& gloo,
                                    const std::vector<int>& names, const ConnectHosts& connect) &&;

 private:
  Handshake(const Layout& layout, Segment own, int rank, int size);

  std::vector<Segment> open_all(c10d::Backend& gloo);

  Layout layout_;
  Segment own_;
  int rank_;
  int size_;
};

}  // namespace syncbn::dist::detail::shm
