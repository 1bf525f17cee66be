#pragma once

#include <syncbn/launch/options.h>

#include <optional>
#include <string>

#include "job/torchrun_protocol.h"
#include "store/store_client.h"

namespace syncbn::launch {

/// A job that torchrun leads: its agent of node 0 holds the store, and knows nothing of failures or
/// restarts elsewhere. What we can do is to take part: say who we are, get our ranks, and leave
/// through its barrier. Calls may wait for an answer of the store for up to 5 s; they throw
/// base::UnavailableError when it is gone.
class TorchrunLead {
 public:
  /// @param store of the agent of node 0.
  TorchrunLead(StoreClient store, const LaunchOptions& options);

  /// Readable when ranks() or all_have_left() may have changed.
  int fd() const { return store_.fd(); }

  /// Once all agents are there.
  std::optional<AssignedRanks> ranks();

  /// While workers run. @throws base::UnavailableError when the store is gone.
  void check();

  /// Our workers have ended well: enters the barrier.
  void leave();
  /// Once all agents are in the barrier.
  bool all_have_left();

 private:
  const LaunchOptions& options_;
  const TorchrunKeys keys_;
  StoreClient store_;
};

}  // namespace syncbn::launch
