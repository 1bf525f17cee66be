// Feeds bytes to the readers of messages from other launchers, heads and torchrun's agents. The
// first byte selects the reader.
#include <syncbn/base/channel.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "common/handshake.h"
#include "common/json_messages.h"
#include "job/flight_file.h"
#include "job/status_socket.h"
#include "job/torchrun_protocol.h"
#include "job/worker_state.h"
#include "nodes/peers.h"
#include "preflight/machine_figures.h"
#include "require.h"
#include "ssh/node_protocol.h"

namespace {

using namespace syncbn::launch;
using Json = nlohmann::json;
using Malformed = Json::exception;

// Each reader gets each message: the types differ only in one or two bytes.
void read_message(const Json& message) {
  may_refuse<Malformed>([&] { Json(message.get<Hello>()); });
  may_refuse<Malformed>([&] { Json(message.get<WorkerState>()); });
  may_refuse<Malformed>([&] { message.get<JobStatus>().in_words(); });
  may_refuse<Malformed>([&] { Json(message.get<Hang>()); });
  may_refuse<Malformed>([&] { Json(message.get<Assignment>()); });
  may_refuse<Malformed>([&] { Json(message.get<FlightFile>()); });
  may_refuse<Malformed>([&] { Json(message.at("ranks").get<AssignedRanks>()); });
  may_refuse<Malformed>([&] { NodeJob::from_json(message).to_json(); });
  // The stored part of a record must be sendable again.
  may_refuse<Malformed>([&] {
    RankRecord record = message;
    if (record.calls.empty()) return;
    const size_t calls = record.calls.size();
    require(shorten(record, {.calls = 1000, .bytes = 1 << 20}));
    require(Json(record).get<RankRecord>().calls.size() == std::min<size_t>(calls, 1000));
  });
  may_refuse<Malformed>([&] {
    judge({message.get<MachineFigures>(), message.get<MachineFigures>()});
  });
}

void read_messages(std::string_view bytes) {
  std::array<int, 2> ends{};
  require(::pipe(ends.data()) == 0);
  require(::write(ends[1], bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
  ::close(ends[1]);
  syncbn::base::Channel channel{syncbn::base::UniqueFd(ends[0])};
  channel.receive();
  while (const auto message = next_message(channel, 4096)) read_message(*message);
}

void shake_hands(Handshake::Side side, const std::string& token, std::string_view bytes) {
  Handshake handshake(side, token);
  if (side == Handshake::Side::kClient) handshake.begin();
  while (!bytes.empty() && !handshake.is_done() && handshake.failure().empty()) {
    const size_t end = std::min(bytes.find('\n'), bytes.size());
    handshake.take(bytes.substr(0, end));
    bytes.remove_prefix(std::min(end + 1, bytes.size()));
  }
  // A fuzzer does not guess a proof.
  require(token.empty() || !handshake.is_done());
}

void read_lines_of_node(std::string_view bytes) {
  NodeLines lines("MARK");
  const NodeLines::Sinks sinks{
      .line = [](std::string_view line) { require(line.find("MARK") == line.npos); },
      .message = [](std::string_view message) { parse_node_message(message); }};
  const size_t half = bytes.size() / 2;
  lines.feed(bytes.substr(0, half), sinks);
  lines.feed(bytes.substr(half), sinks);
  lines.finish(sinks);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr size_t kMaxSize = 32768;  // fits into a pipe
  if (size == 0 || size > kMaxSize) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data + 1), size - 1);
  const std::string token = "0123456789abcdef";
  switch (data[0] % 6) {
    case 0:
      read_messages(bytes);
      break;
    case 1:
      shake_hands(Handshake::Side::kServer, token, bytes);
      break;
    case 2:
      shake_hands(Handshake::Side::kClient, token, bytes);
      break;
    case 3:
      shake_hands(Handshake::Side::kServer, "", bytes);
      break;
    case 4:
      read_lines_of_node(bytes);
      break;
    default:
      TorchrunRole::parse(std::string(bytes));
  }
  return 0;
}
