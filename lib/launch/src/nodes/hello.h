#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace syncbn::launch {

/// What a launcher says of itself to the coordinator: the first message between them.
struct Hello {
  std::string job;  ///< --rdzv_id
  int node = -1;    ///< -1: any
  bool leads = false;
  std::string nodes;  ///< --nnodes
  int nproc = 0;
  std::string role;
  std::string host;
  int max_restarts = 0;

  nlohmann::json json() const;
  /// @throws nlohmann's exceptions when it is not what json() gives.
  static Hello of(const nlohmann::json& message);
};

}  // namespace syncbn::launch
