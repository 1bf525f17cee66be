#pragma once

#include <syncbn/launch/options.h>

#include <optional>
#include <string>

#include "job/torchrun_protocol.h"
#include "store/store_client.h"

namespace syncbn::launch {

/// A job that torchrun leads: its agent of node 0 holds the store, and learns nothing of failures
/// or restarts elsewhere. This launcher announces itself, gets its ranks, and leaves through the
/// agents' barrier. Calls wait up to 5 s for an answer of the store; they throw
/// base::UnavailableError when it is gone.
class TorchrunLead {
 public:
  /// @param store of the agent of node 0.
  TorchrunLead(StoreClient store, const LaunchOptions& options);

  /// Readable when ranks() or all_have_left() may have changed.
  int fd() const { return store_.fd(); }

  /// Nothing until all agents have joined.
  std::optional<AssignedRanks> ranks();

  /// While workers run. @throws base::UnavailableError when the store is gone.
  void check();

  /// Enters the barrier, after our workers have succeeded.
  void leave();
  /// Whether all agents are in the barrier.
  bool all_have_left();

 private:
  const LaunchOptions& options_;
  const TorchrunKeys keys_;
  StoreClient store_;
};

}  // namespace syncbn::launch
