#pragma once

#include <string>
#include <vector>

#include "options/option_help.h"

namespace syncbn::launch {

/// Scripts that make a shell complete syncbn-launch's options, their values, and after the
/// program's name the program's own words.
std::string bash_completion(const std::vector<OptionFacts>& options);
std::string zsh_completion(const std::vector<OptionFacts>& options);

}  // namespace syncbn::launch
