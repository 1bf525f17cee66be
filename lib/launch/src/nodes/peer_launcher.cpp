#include "nodes/peer_launcher.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>

#include <nlohmann/json.hpp>
#include <utility>

namespace syncbn::launch {

PeerLauncher::PeerLauncher(base::UniqueFd socket, std::string first_bytes)
    : link(std::move(socket), std::move(first_bytes)) {}

std::string PeerLauncher::name() const {
  return fmt::format("node {} ({})", rank, host);
}

void PeerLauncher::handle(const std::function<void(const nlohmann::json&)>& take) {
  link.handle();
  if (!greeted) {
    const auto greeting = link.next_line();
    if (!greeting) return;
    if (*greeting + "\n" != AgentLink::kGreeting) {
      return refuse(base::kExitUsage, "the launchers of this job are of different versions");
    }
    greeted = true;
  }
  while (const auto message = link.next()) {
    heard = Clock::now();
    paused = false;
    try {
      take(*message);
    } catch (const nlohmann::json::exception&) {
      return refuse(base::kExitInternal, "node 0 does not understand what this launcher says");
    }
  }
}

void PeerLauncher::refuse(int exit_code, const std::string& why) {
  link.send({{"type", "refuse"}, {"exit_code", exit_code}, {"message", why}});
}

}  // namespace syncbn::launch
