#pragma once

#include <syncbn/base/error.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace syncbn::dist::detail {

/// The replicas of a module during one forward, each on a thread of its own. They meet in the
/// layers that share statistics. Thread-safe.
class ReplicaTeam {
 public:
  /// Thrown in a replica that waits for a replica that has failed.
  struct Abandoned {};

  /// A replica did not arrive at a layer, or arrived at another one.
  struct Error : base::Error {
    Error(int replica, int exit_code, const std::string& message)
        : base::Error(message, exit_code), replica(replica) {}
    const int replica;  ///< the lowest that has returned, is missing, or is in another layer
  };

  /// A replica's arrival at a layer.
  struct Visit {
    const void* layer = nullptr;  ///< the same in all replicas
    std::string name;             ///< for messages: "layer 'bn1'"
    void* part = nullptr;
    /// How long the replica waits for the others, if that is less than the team's timeout.
    std::optional<std::chrono::milliseconds> timeout = std::nullopt;
  };

  /// @param timeout how long a replica waits for the others in a layer
  ReplicaTeam(int size, std::chrono::milliseconds timeout)
      : timeout_(timeout), visits_(static_cast<size_t>(size)), has_left_(visits_.size()) {}

  int size() const { return static_cast<int>(visits_.size()); }

  /// Waits until every replica has arrived at the layer. The last one calls work() with the parts
  /// of all, in the order of replicas, while the others wait.
  /// @throws Error if replicas are in different layers, or if one has returned or does not arrive
  ///   in time; what work() throws. One replica throws these, the others Abandoned.
  void meet(int replica, const Visit& visit,
            const std::function<void(std::span<void* const> parts)>& work);

  /// The replica has returned from its forward.
  void leave(int replica);
  /// The replica has failed: those that wait for it throw Abandoned.
  void fail();

 private:
  void compare() const;
  [[noreturn]] void throw_timeout(const std::string& name, std::chrono::milliseconds timeout) const;

  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;  ///< guards the members below; work of a meeting runs without it
  std::condition_variable changed_;
  std::vector<Visit> visits_;
  std::vector<bool> has_left_;
  int arrived_ = 0;
  uint64_t meetings_ = 0;
  bool is_working_ = false;  ///< the last replica to arrive does the meeting's work
  bool is_over_ = false;     ///< a replica has failed
};

}  // namespace syncbn::dist::detail
