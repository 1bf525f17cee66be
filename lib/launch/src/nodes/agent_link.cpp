#include "nodes/agent_link.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <nlohmann/json.hpp>
#include <utility>

namespace syncbn::launch {
namespace {

// Messages are short, and handled as they come: this is nobody of ours.
constexpr size_t kMostUnread = 1 << 20;

}  // namespace

AgentLink::AgentLink(base::UniqueFd socket, std::string first_bytes)
    : socket_(std::move(socket)), incoming_(std::move(first_bytes)) {
  // Of two failures the one that came first shall arrive first.
  const int on = 1;
  ::setsockopt(socket_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

void AgentLink::send_text(const std::string& text) {
  outgoing_.append(text);
  write();
}

void AgentLink::send(const nlohmann::json& message) {
  // Workers' words may be any bytes.
  send_text(message.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}

void AgentLink::handle() {
  write();
  read();
}

void AgentLink::write() {
  while (!broken_ && !outgoing_.empty()) {
    const ssize_t sent = ::send(socket_.get(), outgoing_.view().data(), outgoing_.size(),
                                MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && errno == EAGAIN) return;
    if (sent < 0) {
      // read() still finds the peer's last words.
      broken_ = true;
      return outgoing_.clear();
    }
    outgoing_.take(static_cast<size_t>(sent));
  }
}

void AgentLink::read() {
  std::array<char, 16384> buffer;
  while (!closed_) {
    const ssize_t got = ::recv(socket_.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) break;
    if (got > 0) incoming_.append(buffer.data(), static_cast<size_t>(got));
    closed_ = got <= 0 || incoming_.size() > kMostUnread;
  }
  closed_ = closed_ || broken_;
}

std::optional<std::string> AgentLink::next_line() {
  const size_t end = incoming_.find('\n');
  if (end == std::string::npos) return std::nullopt;
  std::string line = incoming_.substr(0, end);
  incoming_.erase(0, end + 1);
  return line;
}

std::optional<nlohmann::json> AgentLink::next() {
  const auto line = next_line();
  if (!line) return std::nullopt;
  auto message = nlohmann::json::parse(*line, nullptr, /*allow_exceptions=*/false);
  if (message.is_object() && message.contains("type") && message["type"].is_string()) {
    return message;
  }
  closed_ = true;
  incoming_.clear();
  return std::nullopt;
}

}  // namespace syncbn::launch
