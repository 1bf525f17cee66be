#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace syncbn::base {

/// The value of an environment variable; empty if it is unset or the empty string.
std::optional<std::string> env(const char* name);

/// An environment variable as an integer in [min, max].
/// @throws UserError naming the variable and its value if it is not such an integer.
std::optional<int64_t> env_int(const char* name, int64_t min, int64_t max);

/// This process's environment with these variables, as "NAME=value".
std::vector<std::string> environment_with(const std::map<std::string, std::string>& variables);

/// This machine's host name, for messages.
std::string hostname();

/// The width of the terminal on stderr in columns; 80 if unknown or if stderr is not a terminal.
int terminal_columns();

}  // namespace syncbn::base
