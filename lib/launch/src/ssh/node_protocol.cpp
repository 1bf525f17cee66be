#include "ssh/node_protocol.h"

#include <syncbn/base/error.h>

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>

#include "common/json_messages.h"
#include "output/output.h"

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

// @throws nlohmann's exceptions.
std::optional<NodeMessage> read(const Json& message) {
  const std::string type = message.at("type");
  if (type == "ready") {
    return NodeMessage{.kind = NodeMessage::Kind::kReady, .master_port = message.at("master_port")};
  }
  const int64_t code = message.at("exit_code");
  if (code < 0 || code > 255) return std::nullopt;
  if (type == "problem" && code != base::kExitOk) {
    return NodeMessage{.kind = NodeMessage::Kind::kProblem,
                       .exit_code = static_cast<int>(code),
                       .text = message.at("what")};
  }
  if (type != "ended") return std::nullopt;
  const std::string report = message.at("report");
  return NodeMessage{.kind = NodeMessage::Kind::kEnded,
                     .exit_code = static_cast<int>(code),
                     .text = report,
                     .tells_failure = !parse_json(report).at("failure").is_null()};
}

}  // namespace

Json NodeJob::to_json() const {
  Json json{{"type", "job"},
            {"version", version},
            {"mark", mark},
            {"folder", as_text(folder)},
            {"token", as_text(token)},
            {"environment", Json::object()},
            {"words", Json::array()},
            {"speaks_for_all", speaks_for_all},
            {"colours", {colours.out, colours.err}}};
  for (const auto& [name, value] : environment) json["environment"][as_text(name)] = as_text(value);
  for (const std::string& word : words) json["words"].push_back(as_text(word));
  return json;
}

NodeJob NodeJob::from_json(const Json& message) {
  NodeJob job;
  // Launchers of all versions send these two.
  job.version = message.at("version");
  job.mark = message.at("mark");
  if (job.version != SYNCBN_VERSION) return job;
  job.folder = as_bytes(message.at("folder"));
  job.token = as_bytes(message.at("token"));
  for (const auto& [name, value] : message.at("environment").items()) {
    job.environment[as_bytes(name)] = as_bytes(value);
  }
  for (const std::string word : message.at("words")) job.words.push_back(as_bytes(word));
  job.speaks_for_all = message.at("speaks_for_all");
  job.colours = {.out = message.at("colours").at(0), .err = message.at("colours").at(1)};
  return job;
}

std::string NodeMessage::line(const std::string& mark) const {
  Json json{{"type", "ready"}, {"master_port", master_port}};
  if (kind == Kind::kProblem)
    json = {{"type", "problem"}, {"exit_code", exit_code}, {"what", text}};
  if (kind == Kind::kEnded) json = {{"type", "ended"}, {"exit_code", exit_code}, {"report", text}};
  return mark + json_line(json);
}

std::optional<NodeMessage> NodeMessage::parse(std::string_view text) {
  try {
    return read(parse_json(text));
  } catch (const Json::exception&) {
    return std::nullopt;
  }
}

void NodeLines::feed(std::string_view bytes, const Sinks& to) {
  for (size_t end = 0; (end = bytes.find('\n')) != std::string_view::npos;) {
    line_.append(bytes.substr(0, end));
    end_line(to);
    bytes.remove_prefix(end + 1);
  }
  line_.append(bytes);
  cut(to);
}

void NodeLines::finish(const Sinks& to) {
  line_.resize(std::min(line_.find(mark_), line_.size()));
  if (!line_.empty()) to.line(line_);
  line_.clear();
}

void NodeLines::end_line(const Sinks& to) {
  const std::string_view line = line_;
  const size_t mark = line.find(mark_);
  const bool has_message = mark != std::string_view::npos;
  // A worker may have written a line without a newline before the message.
  if (!has_message || mark > 0) to.line(line.substr(0, mark));
  if (has_message) to.message(line.substr(mark + mark_.size()));
  line_.clear();
}

void NodeLines::cut(const Sinks& to) {
  if (line_.size() <= LineSplitter::kLongest) return;
  const size_t mark = line_.find(mark_);
  if (mark == std::string::npos) {
    // The last bytes may be the start of a mark.
    const size_t size = line_.size() - mark_.size() + 1;
    to.line(std::string_view(line_).substr(0, size));
    line_.erase(0, size);
  } else if (line_.size() > mark + kLongestMessage) {
    end_line(to);
  }
}

}  // namespace syncbn::launch
