#pragma once

#include <syncbn/base/error.h>
#include <syncbn/launch/options.h>

#include <string>
#include <vector>

#include "job/run_context.h"

namespace syncbn::launch {

/// What each worker executes.
struct Command {
  std::string file;                 ///< path for execve
  std::vector<std::string> argv;    ///< argv[0] as the user wrote it
  size_t first_argument = 1;        ///< index in argv of the program's first argument
  std::string local_rank_arg = {};  ///< LaunchOptions::local_rank_arg in the script's spelling
  size_t local_rank_at = 1;         ///< index in argv of that argument: after the script's name
};

/// argv of one worker. $local_rank and ${local_rank} in arguments are replaced, $$ becomes $, and
/// other names stay, as in Python's string.Template.safe_substitute.
std::vector<std::string> worker_argv(const Command& command, int local_rank);

/// The program cannot be started: exit code 127 (not found) or 126 (not executable).
class ProgramError : public base::Error {
 public:
  ProgramError(const std::string& message, int exit_code) : Error(message, exit_code) {}
};

/// Finds a program: a name with a slash is a path; any other is looked for beside the launcher,
/// then in PATH. @throws ProgramError
std::string find_program(const std::string& name);

/// A warning if the command runs a Python script, itself or as in `env X=1 python3 -m NAME`, that
/// declares an option for its local rank, would not get it, and does not take it from LOCAL_RANK
/// either; otherwise empty.
std::string local_rank_warning(const LaunchOptions& options, const Command& command);

/// Finds the program as find_program() does. NAME.py and modules run with `-u` through
/// $PYTHON_EXEC, or the python3 beside the name by which the launcher was called, or python3.
/// @throws ProgramError
Command resolve_program(const LaunchOptions& options);

/// If the program is the `train` beside this launcher, asks it whether its options are right. That
/// takes a quarter of a second. Prints what train warns of.
/// @param variables of this node's first worker
/// @throws ProgramError with train's message and exit code
void check_arguments(const Command& command, const Variables& variables);

/// The text of --dry_run: shell commands that start this node's workers. A comment about the node,
/// an export of the variables that all workers share, then a comment and a command for each worker.
std::string render_plan(const LaunchOptions& options, const RunContext& context,
                        const Command& command);

}  // namespace syncbn::launch
