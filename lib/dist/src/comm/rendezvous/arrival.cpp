#include "rendezvous/arrival.h"

#include <fmt/format.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/machine_id.h>
#include <syncbn/base/random.h>
#include <syncbn/base/text.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <numeric>
#include <utility>

#include "rendezvous/group_store.h"
#include "rendezvous/polls.h"

namespace syncbn::dist::detail {
namespace {

using base::UnavailableError;
using base::UserError;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// Upper bound on the time for which the process that holds the store stays after a refusal, so that
// the other ranks can read it, including those that are still being started.
constexpr milliseconds kRefusalGrace{5000};

constexpr char kRefusedKey[] = "syncbn/refused";
constexpr char kReportersKey[] = "syncbn/reporters";
constexpr char kJobKey[] = "syncbn/job";
constexpr char kBackendKey[] = "syncbn/backend";
constexpr char kRollCallKey[] = "syncbn/roll_call";

std::string rank_key(int rank) {
  return fmt::format("syncbn/arrived/{}", rank);
}

std::string text(const std::vector<uint8_t>& bytes) {
  return {bytes.begin(), bytes.end()};
}

/// Identifies a loopback interface: the machine and the network namespace.
std::string network_id() {
  std::error_code ignored;
  return base::machine_id() + std::filesystem::read_symlink("/proc/self/ns/net", ignored).string();
}

/// What a rank writes to the store when it arrives.
struct Arrival {
  std::string backend;
  std::string gpu;
  std::string process;
  std::string network;
  std::string where;

  std::string str() const {
    return fmt::format("{}|{}|{}|{}|{}", backend, gpu, process, network, where);
  }
  static Arrival parse(const std::string& text) {
    Arrival result;
    size_t begin = 0;
    for (std::string* field : {&result.backend, &result.gpu, &result.process, &result.network}) {
      const size_t end = text.find('|', begin);
      *field = text.substr(begin, end - begin);
      begin = end + 1;
    }
    result.where = text.substr(begin);
    return result;
  }
};

/// Asks for all in one query to the store. @param ranks must have arrived.
std::vector<Arrival> arrivals_of(c10d::Store& store, const std::vector<int>& ranks) {
  std::vector<std::string> keys;
  for (const int rank : ranks) keys.push_back(rank_key(rank));
  std::vector<Arrival> arrivals;
  for (const auto& bytes : store.multiGet(keys)) arrivals.push_back(Arrival::parse(text(bytes)));
  return arrivals;
}

/// Whether all ranks in [begin, end) have arrived, in one query to the store.
bool are_here(c10d::Store& store, int begin, int end) {
  std::vector<std::string> keys;
  for (int rank = begin; rank < end; ++rank) keys.push_back(rank_key(rank));
  return store.check(keys);
}

/// The first rank from `begin` on that has not arrived; `world_size` if all have. Doubles its step:
/// with one query per rank, a job would start with world_size² queries.
int first_absent(c10d::Store& store, int begin, int world_size) {
  int step = 1;
  const auto next = [&] { return std::min(begin + step, world_size); };
  for (; begin < world_size && are_here(store, begin, next()); step *= 2) begin = next();
  while (step > 1) {
    step /= 2;
    if (begin < world_size && are_here(store, begin, next())) begin = next();
  }
  return begin;
}

/// Our ranks report their arrival before Gloo sets its key.
bool is_python(c10d::Store& store, int rank) {
  return store.check({gloo_key(rank)}) && !are_here(store, rank, rank + 1);
}

/// "ranks 1, 2"
std::string named_ranks(const std::vector<std::string>& ranks) {
  constexpr size_t kNamed = 8;
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s",
                     base::join_some(ranks, ", ", kNamed));
}

/// Every process that reads the refusal increments a counter, and the process that holds the store
/// waits until all have.
[[noreturn]] void end_refused(c10d::Store& store, const Place& place, bool holds_store,
                              const std::string& refusal) {
  int64_t reporters = store.add(kReportersKey, 1);
  const auto leave = Clock::now() + kRefusalGrace;
  for (Polls polls; holds_store && reporters < place.world_size && Clock::now() < leave;
       polls.pause()) {
    reporters = store.add(kReportersKey, 0);
  }
  throw UserError(refusal);
}

void end_if_refused(c10d::Store& store, const Place& place, bool holds_store) {
  if (!store.check({kRefusedKey})) return;
  end_refused(store, place, holds_store, text(store.get(kRefusedKey)));
}

[[noreturn]] void refuse_all(c10d::Store& store, const Place& place, bool holds_store,
                             const std::string& refusal) {
  store.set(kRefusedKey, refusal);
  end_refused(store, place, holds_store, refusal);
}

[[noreturn]] void refuse_double(c10d::Store& store, const Place& place, bool holds_store,
                                const std::string& first, const std::string& second) {
  refuse_all(
      store, place, holds_store,
      fmt::format(
          "rank {} was claimed by two processes: on {} and {}; every process of a job needs a RANK "
          "of its own (a script that passes LOCAL_RANK for the rank does this on several nodes){}",
          place.rank, first, second,
          place.file.empty() ? "" : "; or " + place.how_to_separate_jobs()));
}

std::string answer_key(const std::string& roll_call, int rank) {
  return fmt::format("syncbn/answer/{}/{}", roll_call, rank);
}

/// An agent's store may hold the arrival of a process that has ended, which another one is about to
/// replace. So the rank that decides calls the others, and waits until each has answered.
void call_the_roll(c10d::Store& store, const Place& place, bool holds_store,
                   const std::vector<int>& ranks, Clock::time_point deadline, milliseconds limit) {
  if (ranks.size() == 1) return;
  const std::string own = process_id();
  store.set(kRollCallKey, own);
  std::vector<std::string> answers;
  for (const int rank : ranks) {
    if (rank != place.rank) answers.push_back(answer_key(own, rank));
  }
  for (Polls polls; !store.check(answers); polls.pause()) {
    end_if_refused(store, place, holds_store);
    if (Clock::now() <= deadline) continue;
    std::vector<std::string> missing;
    for (const int rank : ranks) {
      if (rank != place.rank && !store.check({answer_key(own, rank)})) {
        missing.push_back(std::to_string(rank));
      }
    }
    throw_missing(place, limit, named_ranks(missing));
  }
}

/// Answers a roll call. @param answered the last one that was answered
void answer_the_roll(c10d::Store& store, int rank, std::string& answered) {
  if (!store.check({kRollCallKey})) return;
  std::string roll_call = text(store.get(kRollCallKey));
  if (roll_call == answered) return;
  store.set(answer_key(roll_call, rank), "here");
  answered = std::move(roll_call);
}

/// Our first rank chooses for all: if each rank read the offers of all others, a thousand ranks
/// would ask the store for a million answers.
std::optional<BackendChoice> agree_on_backend(c10d::Store& store, const Place& place,
                                              bool holds_store, const std::set<int>& python_ranks,
                                              Clock::time_point deadline, milliseconds limit,
                                              const std::function<bool()>& is_over) {
  std::vector<int> ours;
  for (int rank = 0; rank < place.world_size; ++rank) {
    if (python_ranks.count(rank) == 0) ours.push_back(rank);
  }
  if (ours.front() == place.rank) {
    if (place.is_elastic) call_the_roll(store, place, holds_store, ours, deadline, limit);
    const std::vector<Arrival> arrivals = arrivals_of(store, ours);
    std::vector<Offer> offers;
    for (size_t i = 0; i < ours.size(); ++i) {
      offers.push_back({ours[i], arrivals[i].backend, arrivals[i].gpu, arrivals[i].where});
    }
    BackendChoice choice = choose_backend(offers);
    if (choice.backend.empty()) refuse_all(store, place, holds_store, choice.message);
    store.set(kBackendKey, choice.backend);
    return choice;
  }
  std::string answered;
  for (Polls polls; !store.check({kBackendKey}); polls.pause()) {
    if (place.is_elastic) answer_the_roll(store, place.rank, answered);
    end_if_refused(store, place, holds_store);
    if (is_over()) return std::nullopt;
    if (Clock::now() > deadline) {
      throw UnavailableError(
          fmt::format("rank {} of {}: rank {} arrived and then did not choose a backend; see its "
                      "messages",
                      place.rank, place.world_size, ours.front()));
    }
  }
  return BackendChoice{text(store.get(kBackendKey)), ""};
}

std::string missing_ranks(c10d::Store& store, const Place& place) {
  std::vector<std::string> missing;
  const int size = place.world_size;
  for (int rank = first_absent(store, 0, size); rank < size;
       rank = first_absent(store, rank + 1, size)) {
    if (!is_python(store, rank)) missing.push_back(std::to_string(rank));
  }
  return named_ranks(missing);
}

}  // namespace

std::string process_id() {
  // A forked process has the same number but another PID.
  static const std::string number = base::random_id();
  return fmt::format("{}-{}", number, ::getpid());
}

void check_same_job(c10d::Store& store, const Place& place, bool first, Clock::time_point deadline,
                    const std::function<bool()>& is_over) {
  const std::string own = base::env("TORCHELASTIC_RUN_ID").value_or("none");
  if (place.rank == 0 && first) return store.set(kJobKey, own);
  if (place.agent_holds_store) return;
  for (Polls polls; !store.check({kJobKey}); polls.pause()) {
    if (is_python(store, 0)) return;                   // Python writes no name
    if (is_over() || Clock::now() > deadline) return;  // arrive() tells
  }
  const std::string theirs = text(store.get(kJobKey));
  if (theirs == own) return;
  throw UserError(fmt::format("rank {} of job '{}' found another job, '{}', at {}; {}", place.rank,
                              own, theirs, place.meeting_point(), place.how_to_separate_jobs()));
}

void throw_missing(const Place& place, milliseconds limit, const std::string& missing) {
  throw UnavailableError(fmt::format(
      "rank {} of {} waited {} for {}, which did not arrive; see the messages of that rank, or "
      "check that as many processes were started as WORLD_SIZE says",
      place.rank, place.world_size, base::format_seconds(limit), missing));
}

std::optional<Arrived> arrive(c10d::Store& store, const Place& place, const Offer& offer,
                              bool holds_store, Clock::time_point deadline, milliseconds limit,
                              const std::function<bool()>& is_over) {
  const Arrival own{offer.backend, offer.gpu, process_id(), network_id(), offer.where};
  constexpr char kPython[] = "an unknown host (Python's torch.distributed)";
  const auto refuse = [&](const std::string& other) {
    refuse_double(store, place, holds_store, other, own.where);
  };
  if (is_python(store, place.rank)) refuse(kPython);
  const bool is_first = !are_here(store, place.rank, place.rank + 1);
  // Asked before this rank arrives, for which rank 0 may wait to decide.
  const bool can_wait = place.is_elastic && place.rank != 0;
  const bool is_decided =
      can_wait && (store.check({kBackendKey}) || (!is_first && store.check({kRefusedKey})));
  const Arrival first =
      Arrival::parse(store.compareSet(rank_key(place.rank), std::string(), own.str()));
  const bool is_own = first.process == own.process;  // which may have timed out before
  if (can_wait) {
    // An agent never runs two processes of one rank, so another one that arrived as this rank has
    // ended. This process replaces it, unless the attempt is decided: then rank 0 begins another.
    const bool is_complete = is_decided && (is_first || !is_own);
    for (Polls polls; is_complete && !is_over(); polls.pause()) {
      if (Clock::now() > deadline) {
        if (!is_own) refuse(first.where);
        throw_missing(place, limit, "rank 0");
      }
    }
    if (is_complete) return std::nullopt;
  } else if (!is_own) {
    refuse(first.where);
  }
  if (!is_own || !is_first) store.set(rank_key(place.rank), own.str());
  std::set<int> python_ranks;
  Polls polls;
  for (int next = 0;; polls.pause()) {
    for (;; ++next) {
      next = first_absent(store, next, place.world_size);
      if (next == place.world_size || !is_python(store, next)) break;
      python_ranks.insert(next);
    }
    end_if_refused(store, place, holds_store);
    if (next == place.world_size) break;
    if (is_over()) {
      // Only another process of rank 0 can have begun the next attempt.
      if (place.rank == 0) refuse("another process that came later");
      return std::nullopt;
    }
    // This process has not started Gloo yet, so the key is another process's.
    if (is_first && store.check({gloo_key(place.rank)})) refuse(kPython);
    if (Clock::now() > deadline) throw_missing(place, limit, missing_ranks(store, place));
  }
  auto choice = agree_on_backend(store, place, holds_store, python_ranks, deadline, limit, is_over);
  if (!choice) return std::nullopt;
  return Arrived{std::move(python_ranks), *std::move(choice)};
}

bool all_on_one_host(c10d::Store& store, int world_size) {
  std::vector<int> ranks(static_cast<size_t>(world_size));
  std::iota(ranks.begin(), ranks.end(), 0);
  const std::vector<Arrival> arrivals = arrivals_of(store, ranks);
  return std::all_of(arrivals.begin(), arrivals.end(),
                     [own = network_id()](const Arrival& one) { return one.network == own; });
}

}  // namespace syncbn::dist::detail
