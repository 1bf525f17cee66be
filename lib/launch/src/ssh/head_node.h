#pragma once

#include <syncbn/base/channel.h>
#include <syncbn/base/unique_fd.h>
#include <syncbn/launch/options.h>

#include <optional>
#include <string>
#include <vector>

#include "ssh/node_lines.h"
#include "workers/keeper.h"

namespace syncbn::launch {

/// A node's state in the head, with the pipes to its process on this machine: ssh or a launcher.
struct HeadNode {
  enum class State { kAsked, kReady, kRefused, kEnded };
  struct Problem {
    int exit_code = 0;
    std::string what;
  };

  HeadNode(Host where, bool here, const std::string& mark)
      : host(std::move(where)), is_here(here), lines(mark) {}

  Host host;
  bool is_here;  ///< HeadPlan::is_here()
  State state = State::kAsked;
  base::Channel in;
  base::UniqueFd out;
  base::UniqueFd err;
  NodeLines lines;
  std::string last_words;  ///< the last line on its stderr before the job has begun
  std::optional<int> start_error;
  std::optional<int> exit_code;  ///< reported by its launcher
  std::optional<Problem> problem;

  /// Makes the pipes `in`, `out` and `err`, and returns the process for the keeper to start.
  /// @param theirs receives the process's ends of the pipes.
  WorkerSpec connect(const std::vector<std::string>& words, std::vector<base::UniqueFd>& theirs);

  /// Whether ssh failed or was killed, rather than the launcher behind it.
  bool is_lost_connection(int wait_status) const;
  /// Why it ended before it answered.
  /// @param launcher its path on the hosts. @param command the ssh command.
  std::string describe_end(int wait_status, const std::string& launcher,
                           const std::string& command) const;
};

/// True for exit codes of the launcher itself; any other code came from the program that ran in its
/// place.
bool is_launcher_error(int exit_code);

/// The hosts that have not answered: "a, b".
std::string names_of_unanswered(const std::vector<HeadNode>& nodes);

/// A line for each problem: "host, host: problem".
std::vector<std::string> problem_lines(const std::vector<HeadNode>& nodes);

}  // namespace syncbn::launch
