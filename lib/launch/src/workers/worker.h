#pragma once

#include <syncbn/base/unique_fd.h>
#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "workers/agent_reader.h"

namespace syncbn::launch {

/// A worker of this node in one attempt, as the launcher knows it.
struct Worker {
  int rank = 0;
  pid_t pid = 0;
  std::vector<std::string> argv;
  bool running = true;
  std::optional<int> start_error;  ///< errno of a failed fork, binding or exec
  bool bind_failed = false;
  std::optional<int> wait_status;
  bool ended_by_us = false;
  // Our ends of its pipes.
  base::UniqueFd out;
  base::UniqueFd err;
  base::UniqueFd agent;
  AgentReader records;

  /// "exit code 1", or that it could not even be started. Once it has ended.
  std::string end_in_words() const;
};

}  // namespace syncbn::launch
