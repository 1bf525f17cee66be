#include "nodes/peers.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "common/json_messages.h"

namespace syncbn::launch {

Peers::Peers(std::chrono::milliseconds silence, int other) : silence_(silence) {
  watched_.add(other);
}

void Peers::add_newcomer(base::Channel channel) {
  auto peer = std::make_unique<PeerLauncher>(std::move(channel));
  if (!watched_.try_add(peer->channel.fd())) return;  // a launcher tries again
  newcomers_.push_back(std::move(peer));
}

void Peers::handle(const Sink& sink) {
  // All of them: a message may come with the connection, and there are few. A newcomer that says
  // hello moves to the nodes.
  for (size_t i = 0; i < newcomers_.size();) {
    PeerLauncher* const peer = newcomers_[i].get();
    handle_one(*peer, sink);
    if (i == newcomers_.size() || newcomers_[i].get() != peer) continue;
    if (is_gone(*peer, /*excuses_pauses=*/false)) {
      newcomers_.erase(newcomers_.begin() + static_cast<std::ptrdiff_t>(i));
    } else {
      ++i;
    }
  }
  for (const auto& [rank, node] : nodes_) handle_one(*node, sink);
}

void Peers::handle_one(PeerLauncher& peer, const Sink& sink) {
  peer.handle([&](const nlohmann::json& message) { sink(peer, message); });
  watch(peer);
}

void Peers::watch(const PeerLauncher& peer) {
  watched_.change(peer.channel.fd(), EPOLLIN | (peer.channel.unsent() > 0 ? EPOLLOUT : 0U));
}

bool Peers::is_gone(const PeerLauncher& peer, bool excuses_pauses) const {
  if (peer.channel.has_ended() || (peer.leaving && (peer.ended || !peer.takes_part))) return true;
  const bool may_be_silent = peer.paused && excuses_pauses;
  return !may_be_silent && PeerLauncher::Clock::now() - peer.heard > silence_;
}

std::vector<PeerLauncher*> Peers::gone(bool excuses_pauses) const {
  std::vector<PeerLauncher*> all;
  for (const auto& [rank, node] : nodes_) {
    if (is_gone(*node, excuses_pauses)) all.push_back(node.get());
  }
  return all;
}

void Peers::seat(PeerLauncher& newcomer) {
  const auto self = std::find_if(newcomers_.begin(), newcomers_.end(),
                                 [&](const auto& one) { return one.get() == &newcomer; });
  nodes_[newcomer.rank] = std::move(*self);
  newcomers_.erase(self);
}

void Peers::send(PeerLauncher& node, const nlohmann::json& message) {
  send_message(node.channel, message);
  watch(node);
}

void Peers::send_to_nodes(const nlohmann::json& message) {
  for (const auto& [rank, node] : nodes_) send(*node, message);
}

int Peers::present() const {
  return static_cast<int>(std::count_if(nodes_.begin(), nodes_.end(),
                                        [](const auto& one) { return !one.second->leaving; }));
}

int Peers::taking_part() const {
  return static_cast<int>(std::count_if(nodes_.begin(), nodes_.end(),
                                        [](const auto& one) { return one.second->takes_part; }));
}

bool Peers::all_ended() const {
  return std::all_of(nodes_.begin(), nodes_.end(),
                     [](const auto& one) { return one.second->ended || !one.second->takes_part; });
}

bool Peers::any_ended() const {
  return std::any_of(nodes_.begin(), nodes_.end(),
                     [](const auto& one) { return one.second->ended; });
}

void Peers::choose(int room) {
  // Those that took part stay; a newcomer may have got the rank of one that is lost.
  for (const bool took_part : {true, false}) {
    for (const auto& [rank, node] : nodes_) {
      if (node->takes_part != took_part) continue;
      node->takes_part = !node->leaving && room > 0;
      if (node->takes_part) --room;
    }
  }
}

}  // namespace syncbn::launch
