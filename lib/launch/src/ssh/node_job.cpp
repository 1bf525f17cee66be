#include "ssh/node_job.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>

#include <nlohmann/json.hpp>

namespace syncbn::launch {
namespace {

using Json = nlohmann::json;

// JSON holds text, and an argument may hold any bytes: each byte is sent as the code point of its
// value.
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

}  // namespace

Json NodeJob::to_json() const {
  Json json{{"type", "job"},
            {"version", version},
            {"mark", mark},
            {"folder", as_text(folder)},
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
  // These two are the same in all versions.
  job.version = message.at("version");
  job.mark = message.at("mark");
  if (job.version != SYNCBN_VERSION) return job;
  job.folder = as_bytes(message.at("folder"));
  for (const auto& [name, value] : message.at("environment").items()) {
    job.environment[as_bytes(name)] = as_bytes(value);
  }
  for (const std::string word : message.at("words")) job.words.push_back(as_bytes(word));
  job.speaks_for_all = message.at("speaks_for_all");
  job.colours = {.out = message.at("colours").at(0), .err = message.at("colours").at(1)};
  return job;
}

std::string marked_line(const std::string& mark, const Json& message) {
  // A report quotes workers, who may write any bytes.
  return mark + message.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace syncbn::launch
