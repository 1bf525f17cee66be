#include "ssh/node_protocol.h"

#include <cstdint>
#include <nlohmann/json.hpp>

#include "job/job_messages.h"

namespace syncbn::launch {
namespace {

using Json = nlohmann::json;

// JSON holds characters, and an argument may be any bytes: encodes each byte as the character with
// that number.
std::string as_text(const std::string& bytes) {
  std::string text;
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x80) {
      text += c;
    } else {
      text += static_cast<char>(0xc0 | (byte >> 6));
      text += static_cast<char>(0x80 | (byte & 0x3f));
    }
  }
  return text;
}

std::string as_bytes(const std::string& text) {
  std::string bytes;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto first = static_cast<unsigned char>(text[i]);
    if (first < 0x80 || i + 1 == text.size()) {
      bytes += text[i];
    } else {
      const auto second = static_cast<unsigned char>(text[++i]);
      bytes += static_cast<char>(((first & 0x03) << 6) | (second & 0x3f));
    }
  }
  return bytes;
}

// Applies `change` to all texts and keys.
Json with_texts(Json json, std::string (*change)(const std::string&)) {
  if (json.is_string()) return change(json.get_ref<const std::string&>());
  if (json.is_array()) {
    for (Json& one : json) one = with_texts(std::move(one), change);
  } else if (json.is_object()) {
    Json changed = Json::object();
    for (auto& [key, value] : json.items()) changed[change(key)] = with_texts(value, change);
    return changed;
  }
  return json;
}

}  // namespace

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
  Json message = with_texts(*this, as_text);
  message["type"] = "job";
  return message;
}

NodeJob NodeJob::from_json(const Json& message) {
  // Launchers of all versions send these two.
  NodeJob job{.version = message.at("version"), .mark = message.at("mark")};
  return job.version == SYNCBN_VERSION ? with_texts(message, as_bytes).get<NodeJob>() : job;
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
