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

/// A node as its head sees it: the process that stands for it here, ssh or a launcher, and what is
/// known of it.
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
  std::string last_words;  ///< on its stderr, before the job has begun
  std::optional<int> start_error;
  std::optional<int> exit_code;  ///< as its launcher told it
  std::optional<Problem> problem;

  /// What the keeper is to start, with pipes to `in`, `out` and `err`.
  /// @param theirs takes the process's ends of them.
  WorkerSpec connect(const std::vector<std::string>& words, std::vector<base::UniqueFd>& theirs);

  /// Whether this end of its process is that of the connection, and not of a launcher.
  bool is_lost_connection(int wait_status) const;
  /// Why it ended before it answered.
  /// @param launcher on the hosts. @param command that reaches other hosts.
  std::string end_in_words(int wait_status, const std::string& launcher,
                           const std::string& command) const;
};

/// Whether a launcher ends with it before its workers do; others are of what runs in its place.
bool is_launchers(int exit_code);

/// The hosts that have not answered, with commas between.
std::string names_of_unanswered(const std::vector<HeadNode>& nodes);

/// The hosts' problems, a line each; what is wrong on all alike is said once.
std::vector<std::string> problem_lines(const std::vector<HeadNode>& nodes);

}  // namespace syncbn::launch
