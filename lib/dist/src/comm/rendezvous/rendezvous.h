#pragma once

#include <chrono>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <syncbn/dist/process_group.h>

#include "rendezvous/backend_choice.h"

namespace syncbn::dist::detail {

/// A job that this process has joined.
struct Rendezvous {
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;
  int world_size = 1;
  /// This process's addresses for peers, one for each of Gloo's meshes. Empty if there are Python
  /// ranks: Gloo then chooses as in Python's torch.distributed.
  std::vector<std::string> addresses{"127.0.0.1"};
  bool holds_store = false;
  std::set<int> python_ranks;  ///< that run Python's torch.distributed
  BackendChoice choice;
};

/// Opens the job's store and waits until every rank has arrived and a backend is chosen.
/// @param offer without the rank, which this function sets.
/// @param opened null, or a store that the caller has opened and all ranks share. With it,
///   `options` must give rank and world_size, and their init_method is not used.
Rendezvous rendezvous(const InitOptions& options, Offer offer,
                      const c10::intrusive_ptr<c10d::Store>& opened = {});

/// Every rank calls it after its part in making a group. The rank that holds the store waits until
/// all members are connected, even if it is not a member: they still read from the store.
/// @param members the number of members that run this library.
/// @param end_of_member describes a member that has ended; empty if none has.
void leave_rendezvous(const Rendezvous& place, const std::string& group, int members, bool member,
                      std::chrono::milliseconds limit,
                      const std::function<std::string()>& end_of_member);

/// A member calls it before it closes its connections, which would be a failure for a peer that is
/// still connecting. Waits until all members that run this library are connected, one has ended,
/// the store was emptied or `limit` has passed.
/// @return false if the store does not answer.
bool wait_for_members(const Rendezvous& place, const std::string& group,
                      std::chrono::milliseconds limit,
                      const std::function<std::string()>& end_of_member);

}  // namespace syncbn::dist::detail
