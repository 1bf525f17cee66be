#pragma once

#include <chrono>
#include <set>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "rendezvous/place.h"

namespace syncbn::dist::detail {

/// Not that of another process: containers may share a host's name and PID 1.
std::string process_id();

/// Keeps apart two jobs that were given one port or file; an agent's store is its job's own. Rank 0
/// says which job it is when it is `first`, that is, did not find the store made by another
/// process.
/// @throws base::UserError naming both jobs.
void check_same_job(c10d::Store& store, const Place& place, bool first,
                    std::chrono::steady_clock::time_point deadline);

/// Says "this rank is here" and waits for the others.
/// @param holds_store whether the store ends with this process: after a refusal it stays until the
///   others have read it.
/// @throws base::UserError, on every rank that is there, when two processes claim one rank, or when
///   the backends differ; base::UnavailableError naming the ranks that have not come in time.
/// @return the ranks that run Python's torch.distributed.
std::set<int> arrive(c10d::Store& store, const Place& place, const std::string& backend,
                     bool holds_store, std::chrono::steady_clock::time_point deadline,
                     std::chrono::milliseconds limit);

/// Whether all ranks share this process's loopback interface; called after arrive().
bool all_on_one_host(c10d::Store& store, int world_size);

}  // namespace syncbn::dist::detail
