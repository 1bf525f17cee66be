#include "batch_norm/replica_team.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

#include <algorithm>

namespace syncbn::dist::detail {

void ReplicaTeam::meet(int replica, const Visit& visit,
                       const std::function<void(std::span<void* const> parts)>& work) {
  std::unique_lock lock(mutex_);
  if (is_over_) throw Abandoned();
  try {
    visits_[static_cast<size_t>(replica)] = visit;
    ++arrived_;
    const auto left = std::ranges::count(has_left_, true);
    if (left > 0 || arrived_ == size()) compare();
    if (arrived_ == size()) {
      std::vector<void*> parts;
      for (const Visit& one : visits_) parts.push_back(one.part);
      is_working_ = true;
      lock.unlock();
      std::exception_ptr error;
      try {
        work(parts);
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      is_working_ = false;
      if (error) std::rethrow_exception(error);
      std::ranges::fill(visits_, Visit());
      arrived_ = 0;
      ++meetings_;
      changed_.notify_all();
      return;
    }
    const uint64_t meeting = meetings_;
    const auto is_over = [&] { return is_over_ || meetings_ != meeting; };
    const auto timeout = std::min(timeout_, visit.timeout.value_or(timeout_));
    // All have arrived if one works.
    while (!changed_.wait_for(lock, timeout, is_over)) {
      if (!is_working_) throw_timeout(visit.name, timeout);
    }
    if (meetings_ != meeting) return;
  } catch (...) {
    is_over_ = true;
    changed_.notify_all();
    throw;
  }
  throw Abandoned();
}

void ReplicaTeam::leave(int replica) {
  const std::lock_guard lock(mutex_);
  has_left_[static_cast<size_t>(replica)] = true;
  if (arrived_ == 0 || is_over_) return;
  try {
    compare();
  } catch (...) {
    is_over_ = true;
    changed_.notify_all();
    throw;
  }
}

void ReplicaTeam::fail() {
  const std::lock_guard lock(mutex_);
  is_over_ = true;
  changed_.notify_all();
}

/// @throws Error if replicas are in different layers, or one has left.
void ReplicaTeam::compare() const {
  const auto first =
      std::ranges::find_if(visits_, [](const Visit& one) { return one.layer != nullptr; });
  std::vector<std::string> places;
  std::optional<size_t> at_fault;
  for (size_t i = 0; i < visits_.size(); ++i) {
    const Visit& one = visits_[i];
    if (has_left_[i]) {
      places.push_back(fmt::format("replica {} has returned", i));
      at_fault = at_fault.value_or(i);
    } else if (one.layer != nullptr) {
      places.push_back(fmt::format("replica {} is in {}", i, one.name));
      if (one.layer != first->layer) at_fault = at_fault.value_or(i);
    }
  }
  if (!at_fault) return;
  throw Error(
      static_cast<int>(*at_fault), base::kExitUsage,
      fmt::format("SyncBatchNorm: the replicas are in different layers: {}; every replica must run "
                  "the same layers in the same order",
                  base::join(places, ", ")));
}

void ReplicaTeam::throw_timeout(const std::string& name, std::chrono::milliseconds timeout) const {
  std::vector<size_t> missing;
  for (size_t i = 0; i < visits_.size(); ++i) {
    if (visits_[i].layer == nullptr) missing.push_back(i);
  }
  throw Error(static_cast<int>(missing.front()), base::kExitUnavailable,
              fmt::format("SyncBatchNorm: replica{} {} did not arrive at {} within {:.3g} s; raise "
                          "sync_timeout if it needs longer",
                          missing.size() > 1 ? "s" : "", fmt::join(missing, ", "), name,
                          std::chrono::duration<double>(timeout).count()));
}

}  // namespace syncbn::dist::detail
