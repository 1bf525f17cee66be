#include "ssh/node_message.h"

#include <syncbn/base/error.h>

#include <cstdint>
#include <nlohmann/json.hpp>

namespace syncbn::launch {
namespace {

using Json = nlohmann::json;

/// Empty if the number is not an exit code. @throws nlohmann's exceptions.
std::optional<int> exit_code_in(const Json& message) {
  constexpr int64_t kMax = 255;
  const int64_t code = message.at("exit_code");
  return code >= 0 && code <= kMax ? std::optional(static_cast<int>(code)) : std::nullopt;
}

/// Likewise for a port.
std::optional<NodeMessage> read(const Json& message) {
  const std::string type = message.at("type");
  if (type == "ready") {
    return NodeMessage{.kind = NodeMessage::Kind::kReady, .master_port = message.at("master_port")};
  }
  const auto code = exit_code_in(message);
  if (type == "problem" && code.value_or(base::kExitOk) != base::kExitOk) {
    return NodeMessage{
        .kind = NodeMessage::Kind::kProblem, .exit_code = *code, .text = message.at("what")};
  }
  if (type != "ended" || !code) return std::nullopt;
  const std::string report = message.at("report");
  return NodeMessage{.kind = NodeMessage::Kind::kEnded,
                     .exit_code = *code,
                     .text = report,
                     .tells_failure = !Json::parse(report).at("failure").is_null()};
}

}  // namespace

Json NodeMessage::json() const {
  switch (kind) {
    case Kind::kReady:
      return {{"type", "ready"}, {"master_port", master_port}};
    case Kind::kProblem:
      return {{"type", "problem"}, {"exit_code", exit_code}, {"what", text}};
    case Kind::kEnded:
      return {{"type", "ended"}, {"exit_code", exit_code}, {"report", text}};
  }
  return {};
}

std::optional<NodeMessage> NodeMessage::parse(std::string_view text) {
  try {
    return read(Json::parse(text));
  } catch (const Json::exception&) {
    return std::nullopt;
  }
}

}  // namespace syncbn::launch
