#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "common/json_messages.h"

namespace syncbn::launch {

/// Text of a message. What another process sends becomes safe to show or log, as shown_text() says.
struct ShownText : std::string {
  using std::string::string;
  ShownText(std::string text) : std::string(std::move(text)) {}
};

inline void from_json(const nlohmann::json& json, ShownText& text) {
  text = shown_text(json.get_ref<const std::string&>());
}

}  // namespace syncbn::launch
