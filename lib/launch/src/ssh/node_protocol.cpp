#include "ssh/node_protocol.h"

#include <cstdint>
#include <nlohmann/json.hpp>

#include "job/job_messages.h"

namespace syncbn::launch {

using Json = nlohmann::json;

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(NodeReady, master_port)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(NodeProblem, exit_code, what)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(NodeEnded, exit_code, report)
template <>
struct TypeNames<NodeMessage> {
  static constexpr std::array kAll{"ready", "problem", "ended"};
};

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Streams, out, err)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(NodeJob, version, mark, folder, token, environment, words,
                                   speaks_for_all, colours)

Json NodeJob::to_json() const {
  // Words and values may be any bytes, which JSON's texts cannot hold.
  return {{"type", "job"}, {"version", version}, {"mark", mark}, {"job", Json::to_msgpack(*this)}};
}

NodeJob NodeJob::from_json(const Json& message) {
  // Launchers of all versions send these two.
  NodeJob job{.version = message.at("version"), .mark = message.at("mark")};
  if (job.version != SYNCBN_VERSION) return job;
  const auto bytes = message.at("job").get<std::vector<uint8_t>>();
  // As characters: libc++ has no traits of other types.
  return Json::from_msgpack(std::string(bytes.begin(), bytes.end())).get<NodeJob>();
}

std::string node_line(const std::string& mark, const NodeMessage& message) {
  return mark + message_line(message);
}

std::optional<NodeMessage> parse_node_message(std::string_view text) {
  try {
    const Json json = parse_json(text);
    auto message = message_in<NodeMessage>(json);
    const auto code = json.value("exit_code", int64_t{0});
    const bool is_problem = std::holds_alternative<NodeProblem>(message);
    if (code < (is_problem ? 1 : 0) || code > 255) return std::nullopt;
    if (NodeEnded* const ended = std::get_if<NodeEnded>(&message)) {
      ended->tells_failure = !parse_json(ended->report).at("failure").is_null();
    }
    return message;
  } catch (const Json::exception&) {
    return std::nullopt;
  }
}

void NodeLines::feed(std::string_view bytes, const Sinks& to) {
  lines_.feed(bytes, [&](std::string_view line) {
    const size_t mark = line.find(mark_);
    const bool has_message = mark != std::string_view::npos;
    // A worker may have written a line without a newline before the message.
    if (!has_message || mark > 0) to.line(line.substr(0, mark));
    if (has_message) to.message(line.substr(mark + mark_.size()));
  });
  const std::string_view rest = lines_.partial();
  if (rest.size() <= LineSplitter::kLongest || rest.find(mark_) != std::string_view::npos) return;
  lines_.cut(mark_.size() - 1, to.line);  // the last bytes may be the start of a mark
}

void NodeLines::finish(const Sinks& to) {
  lines_.finish([&](std::string_view line) {
    line = line.substr(0, line.find(mark_));
    if (!line.empty()) to.line(line);
  });
}

}  // namespace syncbn::launch
