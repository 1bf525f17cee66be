#include "nodes/peers.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "common/json_messages.h"

namespace syncbn::launch {

// In bytes. A longer message is not from a launcher.
static constexpr size_t kMaxMessage = 1 << 20;

nlohmann::json Hello::json() const {
  return {{"type", "hello"}, {"job", job},
          {"node", node},    {"leads", leads},
          {"nodes", nodes},  {"nproc", nproc},
          {"role", role},    {"host", host},
          {"auth", ""},      {"max_restarts", max_restarts},
          {"what", what},    {"exit_code", exit_code}};
}

Hello Hello::of(const nlohmann::json& message) {
  return {.job = message.at("job"),
          .node = message.at("node"),
          .leads = message.at("leads"),
          .nodes = message.at("nodes"),
          .nproc = message.at("nproc"),
          .role = message.at("role"),
          .host = message.at("host"),
          .max_restarts = message.at("max_restarts"),
          .exit_code = message.value("exit_code", 0),
          .what = message.value("what", "")};
}

std::string PeerLauncher::name() const {
  return fmt::format("node {} ({})", rank, host);
}

void PeerLauncher::refuse(int exit_code, const std::string& why) {
  send_message(channel, {{"type", "refuse"}, {"exit_code", exit_code}, {"message", why}});
}

Peers::Peers(std::chrono::milliseconds silence, int other) : silence_(silence) {
  watched_.add(other);
}

void Peers::add_newcomer(base::Channel channel) {
  auto peer = std::make_unique<PeerLauncher>(std::move(channel));
  if (!watched_.try_add(peer->channel.fd())) return;  // the launcher connects again
  newcomers_.push_back(std::move(peer));
}

void Peers::handle(const Sink& sink) {
  // `sink` may call register_node(), which moves a newcomer to nodes_.
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
  peer.channel.flush();
  peer.channel.receive();
  if (!peer.greeted) {
    if (const auto greeting = peer.channel.next_line(kMaxMessage)) {
      peer.greeted = *greeting + "\n" == Hello::kGreeting;
      if (!peer.greeted) {
        peer.refuse(base::kExitUsage, "the launchers of this job are of different versions");
      }
    }
  }
  try {
    while (peer.greeted) {
      const auto message = next_message(peer.channel, kMaxMessage);
      if (!message) break;
      peer.heard = PeerLauncher::Clock::now();
      peer.paused = false;
      sink(peer, *message);
    }
  } catch (const nlohmann::json::exception&) {
    peer.refuse(base::kExitInternal, "node 0 does not understand a message of this launcher");
  }
  watch(peer);
}

void Peers::watch(PeerLauncher& peer) {
  const short events = peer.channel.events();
  if (std::exchange(peer.watched, events) == events) return;
  watched_.change(peer.channel.fd(), static_cast<uint32_t>(events));
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

void Peers::register_node(PeerLauncher& newcomer) {
  const auto self = std::ranges::find(newcomers_, &newcomer, &std::unique_ptr<PeerLauncher>::get);
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
  return static_cast<int>(
      std::ranges::count_if(nodes_, [](const auto& one) { return !one.second->leaving; }));
}

int Peers::taking_part() const {
  return static_cast<int>(
      std::ranges::count_if(nodes_, [](const auto& one) { return one.second->takes_part; }));
}

bool Peers::all_ended() const {
  return std::ranges::all_of(
      nodes_, [](const auto& one) { return one.second->ended || !one.second->takes_part; });
}

bool Peers::any_ended() const {
  return std::ranges::any_of(nodes_, [](const auto& one) { return one.second->ended; });
}

void Peers::choose(int room) {
  // Nodes of the last attempt first: a newcomer may have got the rank of a lost node.
  for (const bool took_part : {true, false}) {
    for (const auto& [rank, node] : nodes_) {
      if (node->takes_part != took_part) continue;
      node->takes_part = !node->leaving && room > 0;
      if (node->takes_part) --room;
    }
  }
}

}  // namespace syncbn::launch
