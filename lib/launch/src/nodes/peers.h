#pragma once

#include <syncbn/base/channel.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "common/watch_set.h"
#include "nodes/peer_launcher.h"

namespace syncbn::launch {

/// The launchers that are connected to the coordinator: newcomers, until they have said who they
/// are, and the nodes of the job. Never waits. Not thread-safe.
class Peers {
 public:
  using Nodes = std::map<int, std::unique_ptr<PeerLauncher>>;  ///< by node rank
  using Sink = std::function<void(PeerLauncher&, const nlohmann::json&)>;

  /// @param silence after which a peer counts as gone.
  /// @param other is watched, too: fd() is readable when it is.
  Peers(std::chrono::milliseconds silence, int other);

  /// Readable when handle() has something to do.
  int fd() const { return watched_.fd(); }

  void add_newcomer(base::Channel channel);
  /// Hands what all of them say to `sink`, and forgets newcomers that are gone.
  void handle(const Sink& sink);

  const Nodes& nodes() const { return nodes_; }
  /// Makes a newcomer, whose rank is set, a node.
  void seat(PeerLauncher& newcomer);
  /// The nodes that have left or closed the connection, or have been silent for too long.
  /// @param excuses_pauses silence is not held against one that said that it is stopped.
  std::vector<PeerLauncher*> gone(bool excuses_pauses) const;
  void forget(int rank) { nodes_.erase(rank); }

  void send(PeerLauncher& node, const nlohmann::json& message);
  void send_to_nodes(const nlohmann::json& message);

  /// Nodes that could take part in an attempt.
  int present() const;
  int taking_part() const;
  /// Whether the workers of all nodes that take part have ended, and of any.
  bool all_ended() const;
  bool any_ended() const;
  /// Chooses who takes part in the next attempt, so many at the most.
  void choose(int room);

 private:
  bool is_gone(const PeerLauncher& peer, bool excuses_pauses) const;
  void handle_one(PeerLauncher& peer, const Sink& sink);
  void watch(const PeerLauncher& peer);

  const std::chrono::milliseconds silence_;
  WatchSet watched_{"cannot watch the connections of launchers"};
  std::vector<std::unique_ptr<PeerLauncher>> newcomers_;
  Nodes nodes_;
};

}  // namespace syncbn::launch
