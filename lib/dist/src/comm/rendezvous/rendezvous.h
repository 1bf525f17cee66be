#pragma once

#include <chrono>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <syncbn/dist/process_group.h>

namespace syncbn::dist::detail {

/// Where the ranks of a job meet, and who this process is among them.
struct Rendezvous {
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;
  int world_size = 1;
  /// What peers can reach this process by, one address for each of Gloo's meshes. Empty: to be
  /// chosen as Python's torch.distributed does, whose ranks are among them.
  std::vector<std::string> addresses{"127.0.0.1"};
  bool holds_store = false;
  /// The ranks that run Python's torch.distributed.
  std::set<int> python_ranks;
};

/// Reads the environment or the URL of `options`, starts the store on rank 0 (unless an agent holds
/// it already), connects to it on the others, and waits until every rank has arrived with the same
/// `backend`.
Rendezvous rendezvous(const InitOptions& options, const std::string& backend);

/// Every rank calls it when its part of making a group is done. The rank that holds the store waits
/// here until all `members` that are ours are connected, whether it is one or not: they still read
/// from it, and a short program could end before they are through.
/// @param end_of_member in words, once one has ended; empty before.
void leave_rendezvous(const Rendezvous& place, const std::string& group, int members, bool member,
                      std::chrono::milliseconds limit,
                      const std::function<std::string()>& end_of_member);

/// For a member that is about to close its connections: a peer that is still connecting would take
/// that for a failure. Waits until all members that are ours are connected, one has ended, the
/// store was emptied or `limit` has passed.
/// @return false when the store does not answer.
bool wait_for_members(const Rendezvous& place, const std::string& group,
                      std::chrono::milliseconds limit,
                      const std::function<std::string()>& end_of_member);

}  // namespace syncbn::dist::detail
