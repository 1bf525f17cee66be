#pragma once

#include <syncbn/base/unique_fd.h>
#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "common/processes.h"
#include "workers/agent_reader.h"

namespace syncbn::launch {

/// A worker of this node in one attempt.
struct Worker {
  int rank = 0;
  pid_t pid = 0;
  std::vector<std::string> argv;
  bool running = true;
  std::optional<int> start_error;  ///< errno of a failed fork, binding or exec
  bool bind_failed = false;
  std::optional<int> wait_status;
  bool ended_by_us = false;
  // The launcher's ends of the worker's pipes.
  base::UniqueFd out;
  base::UniqueFd err;
  base::UniqueFd agent;
  AgentReader records;

  /// How it ended, such as "exit code 1". Only after its end.
  std::string end_in_words() const {
    return wait_status ? describe_status(*wait_status) : "cannot be started";
  }
};

}  // namespace syncbn::launch
