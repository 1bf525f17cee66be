#pragma once

#include <chrono>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "rendezvous/place.h"

namespace syncbn::dist::detail {

/// The store of a job, as a process reaches it.
struct JoinedStore {
  c10::intrusive_ptr<c10d::Store> store;
  /// This host's numeric address on the way to it.
  std::string address;
  /// Whether it ends with this process.
  bool held_here = false;
  /// Whether this is rank 0 and another process holds the store, which rank 0 should: either two
  /// claim that rank, or the store is another job's.
  bool held_by_other = false;
};

/// Opens the file of `place`; or starts c10d's TCPStore on rank 0, unless an agent holds it, and
/// connects to it on the others.
/// @param other this host's address for peers, where the name in `place` leads to loopback only.
/// @throws base::UserError for a file that cannot be used, base::UnavailableError when nobody
/// answers within `limit`, which ends at `deadline`.
JoinedStore join_job_store(const Place& place, const std::string& other,
                           std::chrono::steady_clock::time_point deadline,
                           std::chrono::milliseconds limit);

}  // namespace syncbn::dist::detail
