#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "rendezvous/place.h"

namespace syncbn::dist::detail {

/// The attempts to form a default group in one store, each with keys of its own. A store holds the
/// keys of earlier ones: of this process, which has destroyed its group or failed to form one, and
/// with an elastic agent of processes that have ended. The process of rank 0 numbers the attempts.
/// TORCHELASTIC_RESTART_COUNT differs between nodes: an agent increments it only after a rank of
/// its own node has failed.
class Attempts {
 public:
  Attempts(c10::intrusive_ptr<c10d::Store> store, const Place& place);

  /// Begins an attempt on rank 0. Joins the newest on other ranks; if this process has left that,
  /// waits for the next.
  /// @return whether there is one by `deadline`
  bool join(std::chrono::steady_clock::time_point deadline);

  /// The keys of the attempt. The first has no prefix, so that ranks of Python's torch.distributed
  /// find it.
  c10::intrusive_ptr<c10d::Store> store() const;

  /// Whether rank 0 has begun another attempt, which this process then joins.
  bool is_over() const;

  /// From now on, this process does not join this attempt again.
  void leave() const;

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
  const std::string id_;  ///< of the store, which may replace another one at the same port
  const bool begins_;
  const bool is_elastic_;
  int64_t number_ = 0;
};

}  // namespace syncbn::dist::detail
