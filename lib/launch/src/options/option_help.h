#pragma once

#include <syncbn/config/field_info.h>

#include <string>
#include <vector>

namespace syncbn::launch {

inline constexpr const char* kUsage = "syncbn-launch [options] program [its arguments ...]";

/// The word for every option after --help.
inline constexpr const char* kAllOptions = "all";

/// The words that may follow --help, besides names of options.
std::vector<std::string> help_topics(const std::vector<config::FieldInfo>& options);

/// The text of --help: the most used options or, with a topic, an option, a group or all.
std::string help_text(const std::vector<config::FieldInfo>& options, std::string topic = "");

/// syncbn-launch(1), for troff's man macros.
std::string man_page(const std::vector<config::FieldInfo>& options);

/// Scripts that make a shell complete syncbn-launch's options and their values, and what follows
/// the program's name as the program's own command line.
std::string bash_completion(const std::vector<config::FieldInfo>& options);
std::string zsh_completion(const std::vector<config::FieldInfo>& options);

}  // namespace syncbn::launch
