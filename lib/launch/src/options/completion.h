#pragma once

#include <syncbn/config/field_info.h>

#include <string>
#include <vector>

namespace syncbn::launch {

/// Scripts that make a shell complete syncbn-launch's options, their values, and after the
/// program's name the program's own words.
std::string bash_completion(const std::vector<config::FieldInfo>& options);
std::string zsh_completion(const std::vector<config::FieldInfo>& options);

}  // namespace syncbn::launch
