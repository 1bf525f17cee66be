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

/// A node as its head sees it: the local process that connects to it (ssh, or the launcher itself)
/// and the node's state.
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
  std::string last_words;  ///< on its stderr before the job began
  std::optional<int> start_error;
  std::optional<int> exit_code;  ///< reported by its launcher
  std::optional<Problem> problem;

  /// The process for the keeper to start, with pipes to `in`, `out` and `err`.
  /// @param theirs takes the process's ends of the pipes.
  WorkerSpec connect(const std::vector<std::string>& words, std::vector<base::UniqueFd>& theirs);

  /// Whether the connection failed, not the launcher.
  bool is_lost_connection(int wait_status) const;
  /// Why the process ended before the node answered.
  /// @param launcher the launcher's path on the hosts. @param command reaches other hosts, as ssh.
  std::string end_in_words(int wait_status, const std::string& launcher,
                           const std::string& command) const;
};

/// Whether a launcher ends with this code before its workers start. Other codes come from a program
/// that runs in its place.
bool is_launchers(int exit_code);

/// The hosts that have not answered, separated by commas.
std::string names_of_unanswered(const std::vector<HeadNode>& nodes);

/// The hosts' problems, one per line; a problem of all hosts is one line.
std::vector<std::string> problem_lines(const std::vector<HeadNode>& nodes);

}  // namespace syncbn::launch
