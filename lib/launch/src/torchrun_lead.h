#pragma once

#include <syncbn/launch/options.h>

#include <optional>
#include <string>

#include "store_client.h"
#include "torchrun_keys.h"

namespace syncbn::launch {

/// A job that torchrun leads: its agent of node 0 holds the store, and knows nothing of failures or
/// restarts elsewhere. What we can do is to take part: say who we are, get our ranks, and leave
/// through its barrier. Calls may wait for an answer of the store for up to 5 s; they throw
/// base::UnavailableError when it is gone.
class TorchrunLead {
 public:
  /// The global rank and the role rank of local rank 0, and the number of all.
  struct Ranks {
    int base = 0;
    int world_size = 1;
    int role_base = 0;
    int role_world_size = 1;
  };

  /// @param store of the agent of node 0.
  TorchrunLead(StoreClient store, const LaunchOptions& options);

  /// Readable when ranks() or all_have_left() may have changed.
  int fd() const { return store_.fd(); }

  /// Once all agents are there.
  std::optional<Ranks> ranks();

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
