#include "nodes/peer_launcher.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>

#include <nlohmann/json.hpp>

#include "common/json_messages.h"
#include "nodes/hello.h"

namespace syncbn::launch {
namespace {

// Launchers send short messages: a longer one is from something else.
constexpr size_t kMaxMessage = 1 << 20;

}  // namespace

std::string PeerLauncher::name() const {
  return fmt::format("node {} ({})", rank, host);
}

void PeerLauncher::handle(const std::function<void(const nlohmann::json&)>& sink) {
  channel.flush();
  channel.receive();
  if (!greeted) {
    const auto greeting = channel.next_line(kMaxMessage);
    if (!greeting) return;
    if (*greeting + "\n" != Hello::kGreeting) {
      return refuse(base::kExitUsage, "the launchers of this job are of different versions");
    }
    greeted = true;
  }
  while (const auto message = next_message(channel, kMaxMessage)) {
    heard = Clock::now();
    paused = false;
    try {
      sink(*message);
    } catch (const nlohmann::json::exception&) {
      return refuse(base::kExitInternal, "node 0 does not understand what this launcher says");
    }
  }
}

void PeerLauncher::refuse(int exit_code, const std::string& why) {
  send_message(channel, {{"type", "refuse"}, {"exit_code", exit_code}, {"message", why}});
}

}  // namespace syncbn::launch
