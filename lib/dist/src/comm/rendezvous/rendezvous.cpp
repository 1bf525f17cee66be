#include "rendezvous/rendezvous.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/socket.h>
#include <syncbn/base/text.h>
#include <syncbn/base/unique_fd.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <thread>

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "rendezvous/arrival.h"
#include "rendezvous/attempts.h"
#include "rendezvous/interfaces.h"
#include "rendezvous/place.h"

namespace syncbn::dist::detail {
namespace {

using base::UnavailableError;
using base::UserError;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kFirstRetryDelay{10};
constexpr milliseconds kLongestRetryDelay{500};
// Time limit for an existing store to answer.
constexpr milliseconds kFirstAnswerTime{1000};
// Time limit for one answer of the store, which may be slow while it serves a thousand ranks.
constexpr timeval kMaxAnswerTime{.tv_sec = 60, .tv_usec = 0};

/// The store of a job, as this process reaches it.
struct JoinedStore {
  c10::intrusive_ptr<c10d::Store> store;
  std::string address;         ///< this host's, numeric, on the route to the store
  bool held_here = false;      ///< this process holds the store
  bool held_by_other = false;  ///< rank 0 should hold it, but another process does: a second rank
                               ///< 0, or the store of another job
};

/// Waits until the store answers. c10d's client would fill the screen with warnings, and wait
/// forever if another program holds the port and does not answer.
StoreEndpoint::Route wait_for_store(const Place& place, const std::string& other,
                                    Clock::time_point deadline, milliseconds limit) {
  std::string reason;
  milliseconds delay = kFirstRetryDelay;
  for (;;) {
    if (const auto route = place.master.probe(deadline, other, reason)) return *route;
    if (Clock::now() + delay > deadline) break;
    std::this_thread::sleep_for(delay);
    delay = std::min(delay * 2, kLongestRetryDelay);
  }
  throw UnavailableError(
      fmt::format("rank {} of {} on {}: nobody answered at MASTER_ADDR:MASTER_PORT {} within {} "
                  "({}); is rank 0 running, and is the address right?",
                  place.rank, place.world_size, base::hostname(), place.master.str(),
                  base::format_seconds(limit), reason));
}

c10d::TCPStoreOptions store_options(const Place& place, milliseconds limit) {
  c10d::TCPStoreOptions options;
  options.port = place.master.port;
  options.numWorkers = static_cast<size_t>(place.world_size);
  // Also bounds the client's retries if the store ends between probe and connection.
  options.timeout = limit;
  return options;
}

/// Bounds the wait for answers: c10d's client has no timeout for them, and does not expose its
/// socket.
void bound_answers(const Place& place) {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", ignored)) {
    const int fd = std::atoi(entry.path().filename().c_str());
    sockaddr_storage address{};
    socklen_t size = sizeof(address);
    auto* generic = reinterpret_cast<sockaddr*>(&address);
    if (::getpeername(fd, generic, &size) != 0 || base::port_of(address) != place.master.port)
      continue;
    base::detect_lost_host(fd);
    ::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &kMaxAnswerTime, sizeof(kMaxAnswerTime));
    ::setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &kMaxAnswerTime, sizeof(kMaxAnswerTime));
  }
}

JoinedStore connect_to(const Place& place, const StoreEndpoint::Route& route, milliseconds limit,
                       bool held_by_other = false) {
  // By address: given a name, the client could spend all of its time on an address that drops
  // packets.
  auto store = c10::make_intrusive<c10d::TCPStore>(route.store, store_options(place, limit));
  bound_answers(place);
  return {std::move(store), route.own, /*held_here=*/false, held_by_other};
}

JoinedStore hold_store(const Place& place, const std::string& other, Clock::time_point deadline,
                       milliseconds limit) {
  std::string reason;
  StoreEndpoint::Listener listener = place.master.listen(place.on_several_hosts(), other);
  if (!listener.fd || !listener.at_host) {
    const auto soon = std::min(deadline, Clock::now() + kFirstAnswerTime);
    if (const auto route = place.master.probe(soon, other, reason)) {
      return connect_to(place, *route, limit, /*held_by_other=*/true);
    }
  }
  if (!listener.fd) {
    throw UnavailableError(
        fmt::format("rank 0 cannot listen on {}: another program holds the port; choose another "
                    "MASTER_PORT",
                    place.master.str()));
  }
  c10d::TCPStoreOptions options = store_options(place, limit);
  options.isServer = true;
  options.waitWorkers = false;  // arrive() waits, and names the missing ranks
  options.masterListenFd = listener.fd.release();
  JoinedStore result;
  result.store = c10::make_intrusive<c10d::TCPStore>(listener.address, options);
  result.held_here = true;
  const std::string holder_key = "syncbn/holder/" + process_id();
  result.store->set(holder_key, "yes");
  const StoreEndpoint::Route route = wait_for_store(place, other, deadline, limit);
  result.address = route.own;
  if (listener.at_host) return result;
  // Either a service that forwards to this store has answered, or the store of another rank 0.
  JoinedStore second = connect_to(place, route, limit, /*held_by_other=*/true);
  return second.store->check({holder_key}) ? result : second;
}

JoinedStore open_file_store(const Place& place, milliseconds limit) {
  // Reports errors at once; FileStore would retry until its timeout.
  const base::UniqueFd fd(::open(place.file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
  if (!fd) {
    throw UserError(fmt::format(
        "rank {} of {} on {}: init_method 'file://{}': {}; its folder must exist, be writable, and "
        "be shared by all ranks",
        place.rank, place.world_size, base::hostname(), place.file, std::strerror(errno)));
  }
  JoinedStore result;
  result.store = c10::make_intrusive<c10d::FileStore>(place.file, place.world_size);
  result.store->setTimeout(limit);
  result.address = "127.0.0.1";  // a file has no route
  return result;
}

/// Whether this process has been in a group with ranks of Python's torch.distributed.
bool is_in_python_job = false;

/// The place of a job whose store the caller has opened.
Place place_of(const c10::intrusive_ptr<c10d::Store>& opened, const InitOptions& options) {
  Place place;
  place.rank = options.rank.value();
  place.world_size = options.world_size.value();
  place.agent_holds_store = true;
  c10d::Store* store = opened.get();
  while (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store)) {
    store = prefixed->getUnderlyingStore().get();
  }
  if (const auto* tcp = dynamic_cast<c10d::TCPStore*>(store)) {
    place.master = {tcp->getHost(), tcp->getPort()};
    place.is_elastic = has_agent_store() && base::env("MASTER_ADDR") == place.master.host &&
                       base::env("MASTER_PORT") == std::to_string(place.master.port);
  } else if (const auto* file = dynamic_cast<c10d::FileStore*>(store)) {
    place.file = file->getPath();
    place.is_elastic = has_agent_store();
  } else {
    place.file = "(a store of the caller)";
  }
  return place;
}

/// Rank 0 counts as the holder of an opened store, because it may be, and the holder must leave
/// last.
JoinedStore join_opened_store(const c10::intrusive_ptr<c10d::Store>& opened, const Place& place,
                              const std::string& outside, Clock::time_point deadline) {
  JoinedStore result;
  result.store = c10::make_intrusive<c10d::PrefixStore>("syncbn", opened);
  result.held_here = place.rank == 0;
  std::string reason;
  const auto route =
      place.file.empty() ? place.master.probe(deadline, outside, reason) : std::nullopt;
  result.address = route ? route->own : "127.0.0.1";
  return result;
}

/// Opens the file of `place`, or starts c10d's TCPStore on rank 0 (unless an agent holds it) and
/// connects to it on the other ranks.
/// @param outside this host's address for peers, if the name in `place` resolves to loopback only.
/// @param limit the time in which the store must answer; it ends at `deadline`.
JoinedStore join_store(const Place& place, const std::string& outside, Clock::time_point deadline,
                       milliseconds limit) {
  if (!place.file.empty()) return open_file_store(place, limit);
  if (place.should_hold_store()) return hold_store(place, outside, deadline, limit);
  return connect_to(place, wait_for_store(place, outside, deadline, limit), limit);
}

/// A store, and this rank's attempt to form a group in it.
struct Joined {
  JoinedStore store;
  Attempts attempt;
};

/// Retries, because an early rank may still find the previous group's store, which rank 0 then
/// closes.
Joined join(const Place& place, const c10::intrusive_ptr<c10d::Store>& opened,
            const std::string& outside, Clock::time_point deadline, milliseconds limit) {
  for (;;) {
    try {
      JoinedStore joined = opened ? join_opened_store(opened, place, outside, deadline)
                                  : join_store(place, outside, deadline, limit);
      Attempts attempt(joined.store, place);
      if (!attempt.join(deadline)) throw_missing(place, limit, "rank 0");
      check_same_job(*attempt.store(), place, !joined.held_by_other, deadline,
                     [&] { return attempt.is_over(); });
      return {std::move(joined), std::move(attempt)};
    } catch (const c10::Error&) {
      if (opened || place.should_hold_store() || Clock::now() > deadline) throw;
    }
    std::this_thread::sleep_for(kFirstRetryDelay);
  }
}

/// This host's address on the route to the store, or `outside` if other hosts cannot reach that.
std::vector<std::string> addresses_for_peers(const JoinedStore& joined, const Rendezvous& job,
                                             const std::string& outside) {
  if (!job.python_ranks.empty()) return {};
  if (!base::is_loopback(joined.address) || outside.empty() ||
      all_on_one_host(*job.store, job.world_size)) {
    return {joined.address};
  }
  return {outside};
}

std::string connected_key(const std::string& group) {
  return fmt::format("syncbn/connected/{}", group);
}

/// Waits until all members are connected. Empty if they are; otherwise the reason.
std::string why_not_connected(const Rendezvous& place, const std::string& group, milliseconds limit,
                              const std::function<std::string()>& end_of_member) {
  const std::string all = connected_key(group) + "/all";
  const auto deadline = Clock::now() + limit;
  // Polls, because the store does not notice when a member ends.
  while (!place.store->check({all})) {
    if (const std::string end = end_of_member(); !end.empty()) {
      if (place.store->check({all})) break;
      return end;
    }
    if (Clock::now() > deadline) {
      return fmt::format("not every rank connected to its peers within {}",
                         base::format_seconds(limit));
    }
  }
  return "";
}

}  // namespace

Rendezvous rendezvous(const InitOptions& options, Offer offer,
                      const c10::intrusive_ptr<c10d::Store>& opened) {
  const Place place = opened ? place_of(opened, options) : Place::find(options);
  offer.rank = place.rank;
  const std::vector<std::string> chosen = chosen_addresses(options.interface);
  Rendezvous result;
  result.rank = place.rank;
  result.world_size = place.world_size;
  if (place.world_size == 1) {
    result.store = c10::make_intrusive<c10d::HashStore>();
    result.choice = choose_backend({offer});
    if (result.choice.backend.empty()) throw UserError(result.choice.message);
    return result;
  }
  if (is_in_python_job) {
    throw UserError(
        "init_process_group: a group with ranks of Python's torch.distributed can be formed once "
        "in a process; start new processes for another");
  }

  const std::string outside = chosen.empty() ? outside_address() : chosen.front();
  const milliseconds limit = options.connect_timeout;
  const auto deadline = Clock::now() + limit;
  try {
    auto [joined, attempt] = join(place, opened, outside, deadline, limit);
    const auto is_over = [&attempt = attempt] { return attempt.is_over(); };
    std::optional<Arrived> arrived;
    while (!arrived) {
      result.store = attempt.store();
      try {
        arrived = arrive(*result.store, place, offer, joined.held_here, deadline, limit, is_over);
      } catch (const UserError&) {
        attempt.leave();
        throw;
      }
      if (arrived) break;
      attempt.join(deadline);
      check_same_job(*attempt.store(), place, !joined.held_by_other, deadline, is_over);
    }
    attempt.leave();
    result.python_ranks = std::move(arrived->python_ranks);
    result.choice = std::move(arrived->choice);
    result.addresses = chosen.empty() ? addresses_for_peers(joined, result, outside) : chosen;
    result.holds_store = joined.held_here;
    result.store->setTimeout(options.timeout);
  } catch (const c10::Error& error) {
    throw UnavailableError(fmt::format("rank {} of {}: the store at {} failed: {}", place.rank,
                                       place.world_size, place.meeting_point(),
                                       error.what_without_backtrace()));
  }
  is_in_python_job = !result.python_ranks.empty();
  return result;
}

void leave_rendezvous(const Rendezvous& place, const std::string& group, int members, bool member,
                      milliseconds limit, const std::function<std::string()>& end_of_member) {
  if (place.world_size == 1) return;
  try {
    if (member && place.store->add(connected_key(group), 1) == members) {
      place.store->set(connected_key(group) + "/all", "yes");
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
    // Without the key, a launcher has emptied the store, so this attempt is over.
    const bool has_own_mark = place.store->check({connected_key(group)});
    return has_own_mark ? end_of_member() : "the store was emptied";
  };
  try {
    static_cast<void>(why_not_connected(place, group, limit, end));
  } catch (const c10::Error&) {
    // The store has ended: the rank that holds it leaves when all are connected, or when it fails.
    return false;
  }
  return true;
}

}  // namespace syncbn::dist::detail
