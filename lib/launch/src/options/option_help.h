#pragma once

#include <string>

namespace syncbn::launch {

inline constexpr const char* kUsage = "syncbn-launch [options] program [its arguments ...]";

/// The text of --help: the most used options or, with a topic, an option, a group or all. help2man
/// makes the manual page of the text about all.
std::string help_text(std::string topic = "");

/// A script that makes `shell` ("bash" or "zsh") complete the options' names, and files.
std::string completion(const std::string& shell);

}  // namespace syncbn::launch
