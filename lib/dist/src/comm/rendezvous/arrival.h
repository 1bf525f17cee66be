#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <set>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "rendezvous/backend_choice.h"
#include "rendezvous/place.h"

namespace syncbn::dist::detail {

/// Unique among processes; names and PIDs may be equal in several containers.
std::string process_id();

/// Checks that no other job was given the same port or file. Skips an agent's store, which serves
/// one job.
/// @param first on rank 0, whether it found no store of another process; it then writes the job's
///   name.
/// @throws base::UserError naming both jobs.
void check_same_job(c10d::Store& store, const Place& place, bool first,
                    std::chrono::steady_clock::time_point deadline,
                    const std::function<bool()>& is_over);

struct Arrived {
  std::set<int> python_ranks;  ///< that run Python's torch.distributed
  BackendChoice choice;        ///< with a message on the first of our ranks only
};

/// Reports this rank's arrival, waits for the others and agrees with them on a backend.
/// @param holds_store whether the store ends with this process, which then stays after a refusal
///   until the other ranks have read it, for up to 5 s.
/// @param is_over whether the attempt that `store` belongs to is over, see Attempts. Under an
///   elastic agent, a rank that finds the attempt complete waits until it is over.
/// @return empty if the attempt is over
/// @throws base::UserError on every rank that has arrived, if two processes claim one rank or
///   choose_backend() refuses; base::UnavailableError naming the ranks that did not arrive in time.
std::optional<Arrived> arrive(c10d::Store& store, const Place& place, const Offer& offer,
                              bool holds_store, std::chrono::steady_clock::time_point deadline,
                              std::chrono::milliseconds limit,
                              const std::function<bool()>& is_over);

/// @param missing "rank 2", "ranks 1, 2"
/// @throws base::UnavailableError: they did not arrive within `limit`
[[noreturn]] void throw_missing(const Place& place, std::chrono::milliseconds limit,
                                const std::string& missing);

/// Whether all ranks share this process's loopback interface. Call it after arrive().
bool all_on_one_host(c10d::Store& store, int world_size);

}  // namespace syncbn::dist::detail
