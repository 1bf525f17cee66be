#include "rendezvous.h"

#include <fmt/format.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <unistd.h>

#include <algorithm>
#include <random>
#include <thread>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "store_endpoint.h"

namespace syncbn::dist::detail {
namespace {

using base::UnavailableError;
using base::UserError;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kFirstRetryDelay{10};
constexpr milliseconds kLongestRetryDelay{500};

struct Place {
  StoreEndpoint master;
  int rank = 0;
  int world_size = 1;
  bool agent_holds_store = false;
  bool holds_store() const { return rank == 0 && !agent_holds_store; }
  /// How the user said it, for messages.
  std::string source;
};

double seconds(milliseconds time) {
  return std::chrono::duration<double>(time).count();
}

int required(const std::optional<int>& given, const char* name, int64_t min, int64_t max,
             const std::string& source) {
  if (given) {
    if (*given < min || *given > max) {
      throw UserError(fmt::format("{} must be from {} to {}, got {}", name, min, max, *given));
    }
    return *given;
  }
  if (const auto value = base::env_int(name, min, max)) return static_cast<int>(*value);
  throw UserError(
      fmt::format("{} needs {}, which is not set; start the program with syncbn-launch, which sets "
                  "it, or give it in InitOptions",
                  source, name));
}

Place find_place(const InitOptions& options) {
  constexpr int64_t kMaxRanks = 1 << 20;
  Place place;
  place.source = fmt::format("init_method '{}'", options.init_method);
  if (options.init_method.starts_with("tcp://")) {
    place.master = StoreEndpoint::parse(options.init_method);
  } else if (options.init_method != "env://") {
    throw UserError(fmt::format("{} is not known; it is env:// or tcp://host:port", place.source));
  } else if (!options.rank && !options.world_size && !base::env("RANK") &&
             !base::env("WORLD_SIZE")) {
    return place;  // no launcher: a world of one rank
  }
  place.world_size = required(options.world_size, "WORLD_SIZE", 1, kMaxRanks, place.source);
  place.rank = required(options.rank, "RANK", 0, kMaxRanks, place.source);
  if (place.rank >= place.world_size) {
    throw UserError(
        fmt::format("RANK={} is not below WORLD_SIZE={}", place.rank, place.world_size));
  }
  if (place.world_size > 1 && place.master.port == 0) {
    const auto host = base::env("MASTER_ADDR");
    const auto port = base::env_int("MASTER_PORT", 1, 65535);
    if (!host || !port) {
      throw UserError(fmt::format(
          "WORLD_SIZE={} needs MASTER_ADDR and MASTER_PORT, and {} is not set; start the program "
          "with syncbn-launch, which sets them",
          place.world_size, host ? "MASTER_PORT" : "MASTER_ADDR"));
    }
    place.master = {*host, static_cast<uint16_t>(*port)};
    const auto agent = base::env("TORCHELASTIC_USE_AGENT_STORE");
    place.agent_holds_store = agent && *agent == "True";
  }
  return place;
}

bool on_several_hosts(int world_size) {
  const auto local = base::env_int("LOCAL_WORLD_SIZE", 1, 1 << 20);
  return local && *local < world_size;
}

/// Waits until the store answers, and says on which way.
/// c10d's own client does this too, with a screenful of warnings, and for ever where the port is
/// that of a program which keeps silent.
StoreEndpoint::Route wait_for_store(const Place& place, Clock::time_point deadline,
                                    milliseconds limit) {
  std::string reason;
  milliseconds delay = kFirstRetryDelay;
  for (;;) {
    if (const auto route = place.master.probe(deadline, reason)) return *route;
    if (Clock::now() + delay > deadline) break;
    std::this_thread::sleep_for(delay);
    delay = std::min(delay * 2, kLongestRetryDelay);
  }
  throw UnavailableError(
      fmt::format("rank {} of {} on {}: nobody answered at MASTER_ADDR:MASTER_PORT {} within {} "
                  "({}); is rank 0 running, and is the address right?",
                  place.rank, place.world_size, base::hostname(), place.master.str(),
                  base::format_seconds(seconds(limit)), reason));
}

std::string rank_key(int rank) {
  return fmt::format("syncbn/arrived/{}", rank);
}
constexpr char kRefusedKey[] = "syncbn/refused";
constexpr char kJobKey[] = "syncbn/job";
// How long the rank that holds the store stays after a refusal, so that the others can read it.
constexpr milliseconds kRefusalGrace{300};

std::vector<uint8_t> bytes(const std::string& text) {
  return {text.begin(), text.end()};
}
std::string text(const std::vector<uint8_t>& bytes) {
  return {bytes.begin(), bytes.end()};
}

/// What a rank says of itself when it arrives: its backend, and where it runs.
struct Arrival {
  std::string backend;
  /// Unlike `where`, never that of another process: containers may share a host's name and PID 1.
  std::string process;
  std::string where;

  std::string str() const { return fmt::format("{}|{}|{}", backend, process, where); }
  static Arrival parse(const std::string& text) {
    const size_t first = text.find('|');
    const size_t second = text.find('|', first + 1);
    return {text.substr(0, first), text.substr(first + 1, second - first - 1),
            text.substr(second + 1)};
  }
};

std::string process_id() {
  static const std::string id = fmt::format("{:08x}", std::random_device()());
  return id;
}

Arrival arrival_of(c10d::Store& store, int rank) {
  return Arrival::parse(text(store.get(rank_key(rank))));
}

/// One rank without a working GPU among others would hang them in their first collective. Rank 0
/// looks at all, the others at rank 0: everybody concerned is told.
void check_same_backend(c10d::Store& store, const Place& place, const Arrival& own) {
  const int end = place.rank == 0 ? place.world_size : 1;
  for (int rank = 0; rank < end; ++rank) {
    const Arrival other = arrival_of(store, rank);
    if (other.backend == own.backend) continue;
    throw UserError(
        fmt::format("rank {} ({}) uses backend {} and rank {} ({}) uses {}; choose one backend for "
                    "all, or find "
                    "out why one of them sees no GPU",
                    place.rank, own.where, own.backend, rank, other.where, other.backend));
  }
}

/// Keeps apart two jobs that were given one port. An agent's store is its job's own.
void check_same_job(c10d::Store& store, const Place& place, Clock::time_point deadline) {
  if (place.agent_holds_store) return;
  const std::string own = base::env("TORCHELASTIC_RUN_ID").value_or("none");
  if (place.rank == 0) return store.set(kJobKey, bytes(own));
  while (!store.check({kJobKey})) {
    if (Clock::now() > deadline) return;  // arrive() says who is missing
    std::this_thread::sleep_for(kFirstRetryDelay);
  }
  const std::string theirs = text(store.get(kJobKey));
  if (theirs == own) return;
  throw UserError(fmt::format(
      "rank {} of job '{}' found another job, '{}', at {}; give each job a MASTER_PORT of its own",
      place.rank, own, theirs, place.master.str()));
}

/// The store of this job, in which the keys of the `earlier` groups are not seen: an agent's store
/// outlives a group. `address` becomes ours on the way to it.
c10::intrusive_ptr<c10d::Store> join_store(const Place& place, const InitOptions& options,
                                           int earlier, Clock::time_point deadline,
                                           std::string& address) {
  const milliseconds limit = options.connect_timeout;
  c10d::TCPStoreOptions store_options;
  store_options.port = place.master.port;
  store_options.waitWorkers = false;  // arrive() waits, and can name who is missing
  store_options.numWorkers = static_cast<size_t>(place.world_size);
  // For its client, which tries again for as long when the store ends between probe and connection.
  store_options.timeout = limit;
  store_options.isServer = place.holds_store();
  std::string host = place.master.host;
  if (place.holds_store()) {
    store_options.masterListenFd =
        place.master.listen(on_several_hosts(place.world_size)).release();
  } else {
    const StoreEndpoint::Route route = wait_for_store(place, deadline, limit);
    address = route.own;
    // Its client would spend all of its time on an address that swallows packets.
    host = route.store;
  }
  c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::TCPStore>(host, store_options);
  store->setTimeout(options.timeout);
  if (place.holds_store()) address = wait_for_store(place, deadline, limit).own;
  if (earlier > 0) {
    store = c10::make_intrusive<c10d::PrefixStore>(fmt::format("init-{}", earlier), store);
  }
  check_same_job(*store, place, deadline);
  return store;
}

/// The same, for a rank that may be so early that it meets the store of the group before, which
/// rank 0 is about to close.
c10::intrusive_ptr<c10d::Store> join_new_store(const Place& place, const InitOptions& options,
                                               int earlier, Clock::time_point deadline,
                                               std::string& address) {
  for (;;) {
    try {
      return join_store(place, options, earlier, deadline, address);
    } catch (const c10::Error&) {
      if (place.holds_store() || Clock::now() > deadline) throw;
    }
    std::this_thread::sleep_for(kFirstRetryDelay);
  }
}

/// Says "rank r is here" and waits for the others. Two processes with one rank are told apart by a
/// counter, and the ranks that wait learn of it.
void arrive(c10d::Store& store, const Place& place, const std::string& backend,
            Clock::time_point deadline, milliseconds limit) {
  const Arrival own{backend, process_id(),
                    fmt::format("{}, process {}", base::hostname(), ::getpid())};
  // A process that gave up may come a second time.
  if (store.add(rank_key(place.rank) + "/count", 1) > 1 &&
      arrival_of(store, place.rank).str() != own.str()) {
    const std::string refusal = fmt::format(
        "two processes have rank {}: one on {} and one on {}; every process of a job needs a RANK "
        "of "
        "its own (was a local rank passed for the global one?)",
        place.rank, arrival_of(store, place.rank).where, own.where);
    store.set(kRefusedKey, bytes(refusal));
    throw UserError(refusal);
  }
  store.set(rank_key(place.rank), bytes(own.str()));
  milliseconds delay{1};
  for (int next = 0;;) {
    while (next < place.world_size && store.check({rank_key(next)})) ++next;
    if (store.check({kRefusedKey})) {
      const std::string refusal = text(store.get(kRefusedKey));
      if (place.rank == 0) std::this_thread::sleep_for(kRefusalGrace);
      throw UserError(refusal);
    }
    if (next == place.world_size) return check_same_backend(store, place, own);
    if (Clock::now() > deadline) break;
    std::this_thread::sleep_for(delay);
    delay = std::min(delay * 2, milliseconds(50));
  }
  std::vector<std::string> missing;
  constexpr size_t kNamed = 8;
  size_t count = 0;
  for (int rank = 0; rank < place.world_size; ++rank) {
    if (store.check({rank_key(rank)})) continue;
    if (++count <= kNamed) missing.push_back(std::to_string(rank));
  }
  if (count > kNamed) missing.push_back(fmt::format("and {} more", count - kNamed));
  throw UnavailableError(
      fmt::format("rank {} of {} waited {} for rank{} {}, which did not come; see the messages of "
                  "that rank, or "
                  "check that as many processes were started as WORLD_SIZE says",
                  place.rank, place.world_size, base::format_seconds(seconds(limit)),
                  count == 1 ? "" : "s", base::join(missing, ", ")));
}

}  // namespace

Rendezvous rendezvous(const InitOptions& options, const std::string& backend) {
  const Place place = find_place(options);
  Rendezvous result;
  result.rank = place.rank;
  result.world_size = place.world_size;
  if (place.world_size == 1) {
    result.store = c10::make_intrusive<c10d::HashStore>();
    return result;
  }

  const milliseconds limit = options.connect_timeout;
  const auto deadline = Clock::now() + limit;
  result.holds_store = place.holds_store();
  // Not attempts: some ranks may have made more of them than others.
  static int groups = 0;
  try {
    result.store = join_new_store(place, options, groups, deadline, result.address);
    arrive(*result.store, place, backend, deadline, limit);
    ++groups;
  } catch (const c10::Error& error) {
    throw UnavailableError(fmt::format("rank {} of {}: the store at {} failed: {}", place.rank,
                                       place.world_size, place.master.str(),
                                       error.what_without_backtrace()));
  }
  // The same for the address that peers get from rank 0's host.
  if (on_several_hosts(place.world_size) && is_loopback(result.address) &&
      !is_loopback(place.master.host)) {
    if (const std::string outside = outside_address(); !outside.empty()) result.address = outside;
  }
  return result;
}

void leave_rendezvous(const Rendezvous& place, const std::string& group, int members, bool member,
                      milliseconds limit) {
  if (place.world_size == 1) return;
  const std::string counter = fmt::format("syncbn/connected/{}", group);
  const std::string all = counter + "/all";
  try {
    if (member && place.store->add(counter, 1) == members) place.store->set(all, bytes("yes"));
    if (place.holds_store) place.store->wait({all}, limit);
  } catch (const c10::Error& error) {
    throw UnavailableError(fmt::format(
        "rank {} of {}: not every rank of group '{}' connected to its peers within {}: {}",
        place.rank, place.world_size, group, base::format_seconds(seconds(limit)),
        error.what_without_backtrace()));
  }
}

}  // namespace syncbn::dist::detail
