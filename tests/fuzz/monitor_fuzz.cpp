// Feeds bytes of another rank to both ends of a peer monitor's connection, and to the parser of its
// messages. The first byte selects the end. launcher_fuzz covers the handshake with a secret.
#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "monitor/monitor_channel.h"
#include "require.h"

namespace {

using namespace syncbn;
using dist::detail::Message;
using dist::detail::MonitorLink;

/// A message that is passed on must say the same, and contain no control characters for a terminal.
void read_message(const std::string& line) {
  const auto message = Message::parse(line);
  if (!message) return;
  const std::string passed_on = message->line();
  const auto again = Message::parse(passed_on);
  require(again && again->fields == message->fields && again->line() == passed_on);
  for (const char c : passed_on) require(c == '\t' || static_cast<unsigned char>(c) >= ' ');
  for (size_t i = 0; i <= message->fields.size(); ++i) static_cast<void>(message->number(i));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr size_t kMaxSize = 32768;  // fits into a socket's buffer
  constexpr size_t kMaxLine = 1024;
  if (size == 0 || size > kMaxSize) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data + 1), size - 1);
  std::array<int, 2> ends{};
  require(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) == 0);
  const base::UniqueFd theirs(ends[1]);
  require(::send(theirs.get(), bytes.data(), bytes.size(), 0) == std::ssize(bytes));
  ::shutdown(theirs.get(), SHUT_WR);
  const bool is_server = data[0] % 2 == 0;
  using Side = base::Handshake::Side;
  MonitorLink link{base::UniqueFd(ends[0]), is_server ? Side::kServer : Side::kClient};
  if (!is_server) link.channel.send(link.handshake.begin());
  link.channel.receive();
  if (!link.shake_hands()) return 0;
  while (const auto line = link.next_line(kMaxLine)) read_message(*line);
  return 0;
}
