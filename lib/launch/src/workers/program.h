#pragma once

#include <syncbn/base/error.h>
#include <syncbn/launch/options.h>

#include <string>
#include <vector>

namespace syncbn::launch {

/// What each worker executes.
struct Command {
  std::string file;               ///< path for execve
  std::vector<std::string> argv;  ///< argv[0] as the user wrote it
  size_t first_argument = 1;      ///< in argv: what follows the program's name
  std::string local_rank_arg;     ///< LaunchOptions::local_rank_arg, as the script spells it
};

/// The words for one worker: $local_rank and ${local_rank} are replaced in its arguments, $$ is a
/// dollar sign, other names after one stay (Python's string.Template.safe_substitute).
std::vector<std::string> worker_argv(const Command& command, int local_rank);

/// The program cannot be started: an error with a shell's exit code, 127 (not found) or 126 (not
/// executable).
class ProgramError : public base::Error {
 public:
  ProgramError(const std::string& message, int exit_code) : Error(message, exit_code) {}
};

/// The path of a program: a name with a slash is one; another is looked for beside the launcher,
/// then in PATH. @throws ProgramError
std::string find_program(const std::string& name);

/// Where this launcher itself is.
std::string launcher_path();

/// What to tell the user of a Python script that declares an option for its local rank and would
/// not get it; empty otherwise.
std::string local_rank_warning(const LaunchOptions& options);

/// Finds the program: a path with a slash as it is; another name beside the launcher, then in PATH;
/// NAME.py and modules through $PYTHON_EXEC, or the python3 beside the name by which the launcher
/// was called, or python3, with -u.
/// @throws ProgramError naming where it was looked for.
Command resolve_program(const LaunchOptions& options);

}  // namespace syncbn::launch
