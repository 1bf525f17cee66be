#include "error_files.h"

#include <fmt/format.h>
#include <stdlib.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>

#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

namespace syncbn::launch {

ErrorFiles::ErrorFiles() {
  std::string name = base::env("TMPDIR").value_or("/tmp") + "/syncbn-launch-XXXXXX";
  if (::mkdtemp(name.data()) == nullptr) {
    base::throw_errno(fmt::format("cannot make a temporary folder {} (TMPDIR)", name));
  }
  folder_ = name;
}

ErrorFiles::~ErrorFiles() {
  if (!keep_) remove();
}

void ErrorFiles::remove() const {
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

std::filesystem::path ErrorFiles::path(int rank) const {
  return folder_ / fmt::format("rank_{}_error.json", rank);
}

std::string ErrorFiles::message(int rank) const {
  std::ifstream file(path(rank));
  std::string text(std::istreambuf_iterator<char>(file), {});
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  // {"message": {"message": "ValueError: …", "extraInfo": {…}}} or {"message": "…"}
  if (!json.is_object() || !json.contains("message")) return text;
  const nlohmann::json& message = json["message"];
  if (message.is_string()) return message.get<std::string>();
  if (message.is_object() && message.contains("message") && message["message"].is_string()) {
    return message["message"].get<std::string>();
  }
  return text;
}

}  // namespace syncbn::launch
