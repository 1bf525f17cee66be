#include "nodes/peers.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>

#include <algorithm>
#include <cerrno>

#include "common/json_messages.h"

namespace syncbn::launch {

// Upper bound on a newcomer's first message: until then it may be any program.
static constexpr size_t kMaxHello = size_t{64} << 10;
// Upper bound on the incomplete messages of all newcomers together. Above it, newcomers with more
// unread bytes than a line of the handshake are dropped.
static constexpr size_t kMaxUnread = size_t{64} << 20;

std::string PeerLauncher::name() const {
  return fmt::format("node {} ({})", rank, hello.host);
}

void PeerLauncher::refuse(int exit_code, const std::string& why) {
  refused = true;
  send_line(channel, message_line(ToNode(Refuse{exit_code, why})), protection.get());
}

Peers::Peers(Handshake handshake, std::chrono::milliseconds silence, int other)
    : handshake_(std::move(handshake)), silence_(silence) {
  watched_.add(other);
}

void Peers::add_newcomer(base::Channel channel) {
  auto peer = std::make_unique<PeerLauncher>(std::move(channel), handshake_);
  if (!watched_.try_add(peer->channel.fd())) return;
  if (newcomers_.size() >= max_newcomers()) {
    unwatch(*newcomers_.front());
    newcomers_.erase(newcomers_.begin());
  }
  newcomers_.push_back(std::move(peer));
}

void Peers::handle(const Sink& sink) {
  // Take the time before reading, and read every ready connection: if this process waited for a
  // core, unread messages are not silence.
  looked_at_ = Clock::now();
  const std::vector<int> ready = watched_.ready(nodes_.size() + newcomers_.size() + 1);
  const auto handle_if_ready = [&](PeerLauncher& peer) {
    const bool is_new = std::exchange(peer.is_new, false);
    if (is_new || std::ranges::binary_search(ready, peer.channel.fd())) handle_one(peer, sink);
  };
  size_t unread = 0;
  // `sink` may call register_node(), which moves a newcomer to nodes_.
  for (size_t i = 0; i < newcomers_.size();) {
    PeerLauncher* const peer = newcomers_[i].get();
    handle_if_ready(*peer);
    if (i == newcomers_.size() || newcomers_[i].get() != peer) continue;
    const size_t size = peer->channel.input().size();
    unread += size;
    const bool is_too_much = unread > kMaxUnread && size > Handshake::kMaxLine;
    if (is_too_much || is_gone(*peer, /*may_be_silent=*/false)) {
      unwatch(*peer);
      newcomers_.erase(newcomers_.begin() + static_cast<std::ptrdiff_t>(i));
    } else {
      ++i;
    }
  }
  for (const auto& [rank, node] : nodes_) handle_if_ready(*node);
}

void Peers::handle_one(PeerLauncher& peer, const Sink& sink) {
  peer.channel.flush();
  const bool is_newcomer = peer.rank < 0;
  peer.channel.receive(is_newcomer ? kMaxHello : base::Channel::kMaxAtOnce);
  if (!peer.handshake.is_done() && !peer.refused) {
    if (peer.handshake.advance(peer.channel)) peer.protection = peer.handshake.protection();
    const std::string& failure = peer.handshake.failure();
    if (!failure.empty()) refuse(peer, base::kExitUsage, failure);
  }
  try {
    while (peer.handshake.is_done() && !peer.refused) {
      const auto message = next_message(peer.channel, peer.rank < 0 ? kMaxHello : kMaxMessage,
                                        peer.protection.get());
      if (!message) break;
      const auto known = message_in<FromNode>(*message);
      sink(peer, known);
      if (peer.rank < 0) continue;  // messages do not extend the time for its hello
      peer.heard = Clock::now();
    }
  } catch (const nlohmann::json::exception&) {
    refuse(peer, base::kExitInternal, "node 0 does not understand a message of this launcher");
  }
  const int error = peer.channel.error();
  const bool is_bad = error == EBADMSG || error == EMSGSIZE;
  if (is_bad && !std::exchange(peer.refused, true)) {
    refusals_.push_back(
        peer.rank < 0
            ? fmt::format("refused a launcher at {}: it sent {}", peer.address, kBadMessage)
            : fmt::format("{} sent {}; it counts as lost", peer.name(), kBadMessage));
  }
  if (peer.refused) peer.channel.consume(peer.channel.input().size());
  watch(peer);
}

void Peers::refuse(PeerLauncher& peer, int exit_code, const std::string& why) {
  peer.refuse(exit_code, why);
  refusals_.push_back(fmt::format("refused a launcher at {}: {}", peer.address, why));
}

void Peers::watch(PeerLauncher& peer) {
  const short events = peer.channel.events();
  if (std::exchange(peer.watched, events) == events) return;
  watched_.change(peer.channel.fd(), static_cast<uint32_t>(events));
}

bool Peers::is_gone(const PeerLauncher& peer, bool may_be_silent) const {
  if (peer.refused && peer.rank >= 0) return true;
  if (peer.channel.has_ended()) return true;
  return !may_be_silent && looked_at_ - peer.heard > silence_;
}

void Peers::remove(int rank) {
  unwatch(*nodes_.at(rank));
  nodes_.erase(rank);
}

std::vector<int> Peers::gone(const std::function<bool(int)>& may_be_silent) const {
  std::vector<int> all;
  for (const auto& [rank, node] : nodes_) {
    if (is_gone(*node, may_be_silent(rank))) all.push_back(rank);
  }
  return all;
}

void Peers::register_node(PeerLauncher& newcomer) {
  const auto self = std::ranges::find(newcomers_, &newcomer, &std::unique_ptr<PeerLauncher>::get);
  nodes_[newcomer.rank] = std::move(*self);
  newcomers_.erase(self);
}

void Peers::send(PeerLauncher& node, const std::string& line) {
  send_line(node.channel, line, node.protection.get());
  watch(node);
}

size_t Peers::room(const PeerLauncher& node) {
  constexpr size_t kMaxUnsent = base::Channel::kMaxUnsent / 2;
  return kMaxUnsent - std::min(kMaxUnsent, node.channel.unsent());
}

bool Peers::send_if_room(PeerLauncher& node, const ToNode& message) {
  const std::string line = message_line(message);
  if (line.size() > room(node)) return false;
  send(node, line);
  return true;
}

void Peers::send_to_nodes(const ToNode& message) {
  const std::string line = message_line(message);
  for (const auto& [rank, node] : nodes_) send(*node, line);
}

}  // namespace syncbn::launch
