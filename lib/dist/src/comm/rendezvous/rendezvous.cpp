#include "rendezvous/rendezvous.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

#include <thread>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "rendezvous/arrival.h"
#include "rendezvous/interfaces.h"
#include "rendezvous/job_store.h"

namespace syncbn::dist::detail {
namespace {

using base::UnavailableError;
using base::UserError;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kRetryDelay{10};

/// How many groups this process has been in. Not attempts: some ranks may have made more of them
/// than others.
struct History {
  int groups = 0;
  bool with_python = false;
};

History& history() {
  static History instance;
  return instance;
}

/// The store of this job, in which the keys of the earlier groups are not seen: an agent's store
/// outlives a group.
JoinedStore join_store(const Place& place, const std::string& outside, Clock::time_point deadline,
                       milliseconds limit) {
  JoinedStore result = join_job_store(place, outside, deadline, limit);
  if (const int earlier = history().groups; earlier > 0) {
    result.store =
        c10::make_intrusive<c10d::PrefixStore>(fmt::format("init-{}", earlier), result.store);
  }
  check_same_job(*result.store, place, !result.held_by_other, deadline);
  return result;
}

/// The same, for a rank that may be so early that it meets the store of the group before, which
/// rank 0 is about to close.
JoinedStore join_new_store(const Place& place, const std::string& outside,
                           Clock::time_point deadline, milliseconds limit) {
  for (;;) {
    try {
      return join_store(place, outside, deadline, limit);
    } catch (const c10::Error&) {
      if (place.should_hold_store() || Clock::now() > deadline) throw;
    }
    std::this_thread::sleep_for(kRetryDelay);
  }
}

/// Peers get the address on the way to the store, unless that is of use on this host only.
std::vector<std::string> addresses_for_peers(const JoinedStore& joined, const Rendezvous& job,
                                             const std::string& outside) {
  if (!job.python_ranks.empty()) return {};
  if (!is_loopback(joined.address) || outside.empty() ||
      all_on_one_host(*joined.store, job.world_size)) {
    return {joined.address};
  }
  return {outside};
}

std::string connected_key(const std::string& group) {
  return fmt::format("syncbn/connected/{}", group);
}

std::string all_connected_key(const std::string& group) {
  return connected_key(group) + "/all";
}

/// Waits for all members; empty once they are connected.
std::string why_not_connected(const Rendezvous& place, const std::string& group, milliseconds limit,
                              const std::function<std::string()>& end_of_member) {
  const std::string all = all_connected_key(group);
  const auto deadline = std::chrono::steady_clock::now() + limit;
  // In short waits: the store does not hear of a member's end.
  while (!place.store->check({all})) {
    if (const std::string end = end_of_member(); !end.empty()) {
      if (place.store->check({all})) break;
      return end;
    }
    if (std::chrono::steady_clock::now() > deadline) {
      return fmt::format("not every rank connected to its peers within {}",
                         base::format_seconds(std::chrono::duration<double>(limit).count()));
    }
  }
  return "";
}

}  // namespace

Rendezvous rendezvous(const InitOptions& options, const std::string& backend) {
  const Place place = Place::find(options);
  const std::vector<std::string> chosen = chosen_addresses(options.interface);
  Rendezvous result;
  result.rank = place.rank;
  result.world_size = place.world_size;
  if (place.world_size == 1) {
    result.store = c10::make_intrusive<c10d::HashStore>();
    return result;
  }
  if (history().with_python) {
    throw UserError(
        "init_process_group: a group with ranks of Python's torch.distributed can be formed once "
        "in a process; start new processes for another");
  }

  const std::string outside = chosen.empty() ? outside_address() : chosen.front();
  const milliseconds limit = options.connect_timeout;
  const auto deadline = Clock::now() + limit;
  try {
    const JoinedStore joined = join_new_store(place, outside, deadline, limit);
    result.python_ranks = arrive(*joined.store, place, backend, joined.held_here, deadline, limit);
    result.addresses = chosen.empty() ? addresses_for_peers(joined, result, outside) : chosen;
    result.holds_store = joined.held_here;
    result.store = joined.store;
    result.store->setTimeout(options.timeout);
  } catch (const c10::Error& error) {
    throw UnavailableError(fmt::format("rank {} of {}: the store at {} failed: {}", place.rank,
                                       place.world_size, place.meeting_point(),
                                       error.what_without_backtrace()));
  }
  ++history().groups;
  history().with_python = !result.python_ranks.empty();
  return result;
}

void leave_rendezvous(const Rendezvous& place, const std::string& group, int members, bool member,
                      milliseconds limit, const std::function<std::string()>& end_of_member) {
  if (place.world_size == 1) return;
  try {
    if (member && place.store->add(connected_key(group), 1) == members) {
      place.store->set(all_connected_key(group), "yes");
    }
    if (!place.holds_store || members == 0) return;
    if (const std::string why_not = why_not_connected(place, group, limit, end_of_member);
        !why_not.empty()) {
      throw UnavailableError(fmt::format("rank {} of {}: group '{}' was not formed: {}", place.rank,
                                         place.world_size, group, why_not));
    }
  } catch (const c10::Error& error) {
    throw UnavailableError(
        fmt::format("rank {} of {}: the store failed while the ranks of group '{}' connected to "
                    "their peers: {}",
                    place.rank, place.world_size, group, error.what_without_backtrace()));
  }
}

bool wait_for_members(const Rendezvous& place, const std::string& group, milliseconds limit,
                      const std::function<std::string()>& end_of_member) {
  if (place.world_size == 1) return true;
  const auto end = [&]() -> std::string {
    // Otherwise a launcher has emptied the store since: its attempt is over.
    const bool has_own_mark = place.store->check({connected_key(group)});
    return has_own_mark ? end_of_member() : "the store was emptied";
  };
  try {
    static_cast<void>(why_not_connected(place, group, limit, end));
  } catch (const c10::Error&) {
    // The rank that holds the store leaves it when all are connected, or when it fails.
    return false;
  }
  return true;
}

}  // namespace syncbn::dist::detail
