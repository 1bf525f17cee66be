#pragma once

#include <syncbn/base/channel.h>
#include <syncbn/base/socket.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/clock.h"
#include "common/descriptors.h"
#include "common/handshake.h"
#include "job/job_messages.h"

namespace syncbn::launch {

/// A launcher's connection to the coordinator.
struct PeerLauncher {
  PeerLauncher(base::Channel connection, Handshake first)
      : channel(std::move(connection)),
        address(base::peer_address(channel.fd())),
        handshake(std::move(first)) {}

  base::Channel channel;
  short watched = POLLIN;  ///< the events that wake Peers
  bool is_new = true;      ///< its channel may hold input that causes no event
  std::string address;     ///< of the launcher's end
  Handshake handshake;
  std::unique_ptr<base::MessageSeal> protection;  ///< once the handshake is done
  bool refused = false;                           ///< what it sends from now on is ignored
  int rank = -1;                                  ///< node rank; -1: it has not sent its hello
  Hello hello;                                    ///< empty until it arrives
  Clock::time_point heard = Clock::now();         ///< its last message, or when it connected

  std::string name() const;

  /// Sends the reason. A launcher then ends by itself; a node is lost.
  void refuse(int exit_code, const std::string& why);
};

/// The launchers that are connected to the coordinator: the nodes of the job, and newcomers, which
/// have to send their hello within `silence` of connecting. If there are too many newcomers, the
/// oldest is dropped. Never waits. Not thread-safe.
class Peers {
 public:
  using Nodes = std::map<int, std::unique_ptr<PeerLauncher>>;  ///< by node rank
  using Sink = std::function<void(PeerLauncher&, const FromNode&)>;

  /// In bytes. A longer message is not from a launcher.
  static constexpr size_t kMaxMessage = size_t{4} << 20;

  /// @param handshake copied for each launcher; not begun.
  /// @param silence time without messages after which a peer counts as gone.
  /// @param other another descriptor to include in fd().
  Peers(Handshake handshake, std::chrono::milliseconds silence, int other);

  /// Readable when handle() has something to do.
  int fd() const { return watched_.fd(); }

  void add_newcomer(base::Channel channel);
  /// Why launchers were refused, for the user.
  std::vector<std::string> take_refusals() { return std::exchange(refusals_, {}); }
  /// Passes all messages to `sink`, and removes newcomers that are gone.
  void handle(const Sink& sink);

  const Nodes& nodes() const { return nodes_; }
  /// Turns a newcomer with a rank into a node.
  void register_node(PeerLauncher& newcomer);
  /// The ranks of nodes that were refused, closed the connection or were silent for too long at the
  /// last handle().
  /// @param may_be_silent a node that announced a pause.
  std::vector<int> gone(const std::function<bool(int node)>& may_be_silent) const;
  void remove(int rank);

  void send(PeerLauncher& node, const ToNode& message) { send(node, message_line(message)); }
  /// The size of an optional message that a node has room for: a full channel would end, and
  /// heartbeats would wait behind the message.
  static size_t room(const PeerLauncher& node);
  /// Sends an optional message. Returns false if there is no room.
  bool send_if_room(PeerLauncher& node, const ToNode& message);
  void send_to_nodes(const ToNode& message);

 private:
  /// Closing is not enough: a forked process may have the socket as well.
  void unwatch(const PeerLauncher& peer) { watched_.remove(peer.channel.fd()); }
  bool is_gone(const PeerLauncher& peer, bool may_be_silent) const;
  /// Shakes hands, sends and receives, without waiting. Refuses a launcher of another version, and
  /// one whose message is unknown.
  void handle_one(PeerLauncher& peer, const Sink& sink);
  /// Sends the reason, and keeps it for take_refusals().
  void refuse(PeerLauncher& peer, int exit_code, const std::string& why);
  void send(PeerLauncher& node, const std::string& line);
  void watch(PeerLauncher& peer);

  const Handshake handshake_;
  const std::chrono::milliseconds silence_;
  Clock::time_point looked_at_ = Clock::now();
  std::vector<std::string> refusals_;
  WatchSet watched_{"cannot watch the connections of launchers"};
  std::vector<std::unique_ptr<PeerLauncher>> newcomers_;
  Nodes nodes_;
};

}  // namespace syncbn::launch
