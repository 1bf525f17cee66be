#pragma once

#include <syncbn/base/channel.h>
#include <syncbn/base/socket.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "common/descriptors.h"
#include "common/handshake.h"
#include "job/run_context.h"
#include "job/shown_text.h"

namespace syncbn::launch {

/// A launcher's first message to the coordinator, about itself.
struct Hello {
  std::string job = {};  ///< --rdzv_id
  int node = -1;         ///< -1: any
  bool leads = false;
  std::string nodes = {};  ///< --nnodes
  int nproc = 0;
  std::string role = {};
  ShownText host = {};
  int max_restarts = 0;
  bool is_check = false;  ///< of --preflight, ahead of the job
  int exit_code = 0;      ///< not 0: this launcher cannot start its workers, and ends the job
  ShownText what = {};    ///< why
  /// The host's addresses, if the job has a token: node 0 accepts clients of the store from these.
  std::vector<std::string> addresses = {};
};

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Hello, job, node, leads, nodes, nproc, role, host, max_restarts,
                                   is_check, exit_code, what, addresses)

/// In the message that starts an attempt.
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Assignment, master_addr, master_port, job_id, agent_store,
                                   attempt, restart_count, reason, node, nodes, ranks)

/// A launcher's connection to the coordinator, and the state of its node.
struct PeerLauncher {
  using Clock = std::chrono::steady_clock;

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
  bool takes_part = false;                        ///< in this attempt
  bool ended = false;                             ///< its workers have ended in this attempt
  bool leaving = false;                           ///< it leaves the job; the others go on
  bool excluded = false;                          ///< node 0 has made it leave (--exclude_failing)
  bool paused = false;                            ///< stopped, as by Ctrl-Z
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
  using Sink = std::function<void(PeerLauncher&, const nlohmann::json&)>;

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
  /// The nodes that have left, closed the connection or been silent for too long at the last
  /// handle().
  /// @param excuses_pauses a node that announced a pause may be silent.
  std::vector<PeerLauncher*> gone(bool excuses_pauses) const;
  void remove(int rank);

  void send(PeerLauncher& node, const nlohmann::json& message);
  /// The size of an optional message that a node has room for: a full channel would end, and
  /// heartbeats would wait behind the message.
  static size_t room(const PeerLauncher& node);
  /// Sends an optional message, already serialised. Returns false if there is no room.
  bool send_if_room(PeerLauncher& node, const std::string& line);
  void send_to_nodes(const nlohmann::json& message);

  /// Nodes that could take part in an attempt.
  int present() const;
  int taking_part() const;
  /// Whether the workers of all nodes in this attempt have ended.
  bool all_ended() const;
  bool any_ended() const;
  /// Selects at most `room` nodes for the next attempt.
  void choose(int room);

 private:
  /// Closing is not enough: a forked process may have the socket as well.
  void unwatch(const PeerLauncher& peer) { watched_.remove(peer.channel.fd()); }
  bool is_gone(const PeerLauncher& peer, bool excuses_pauses) const;
  /// Sends and receives without waiting. Refuses a launcher of another version, and one whose
  /// message makes `sink` throw nlohmann's exceptions.
  void handle_one(PeerLauncher& peer, const Sink& sink);
  void shake_hands(PeerLauncher& peer);
  /// Sends the reason, and keeps it for take_refusals().
  void refuse(PeerLauncher& peer, int exit_code, const std::string& why);
  void watch(PeerLauncher& peer);

  const Handshake handshake_;
  const std::chrono::milliseconds silence_;
  PeerLauncher::Clock::time_point looked_at_ = PeerLauncher::Clock::now();
  std::vector<std::string> refusals_;
  WatchSet watched_{"cannot watch the connections of launchers"};
  std::vector<std::unique_ptr<PeerLauncher>> newcomers_;
  Nodes nodes_;
};

}  // namespace syncbn::launch
