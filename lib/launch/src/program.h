#pragma once

#include <syncbn/launch/options.h>

#include <stdexcept>
#include <string>
#include <vector>

namespace syncbn::launch {

/// What each worker executes.
struct Command {
  std::string file;               ///< path for execve
  std::vector<std::string> argv;  ///< argv[0] as the user wrote it
};

/// The program cannot be started: one message, exit code 127 (not found) or 126 (not executable).
class ProgramError : public std::runtime_error {
 public:
  ProgramError(const std::string& message, int exit_code)
      : std::runtime_error(message), exit_code_(exit_code) {}
  int exit_code() const noexcept { return exit_code_; }

 private:
  int exit_code_;
};

/// Finds the program: a path with a slash as it is; another name beside the launcher, then in PATH;
/// NAME.py and modules through ${PYTHON_EXEC:-python3} -u.
/// @throws ProgramError naming where it was looked for.
Command resolve_program(const LaunchOptions& options);

}  // namespace syncbn::launch
