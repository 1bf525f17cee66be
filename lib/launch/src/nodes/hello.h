#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace syncbn::launch {

/// A launcher's first message to the coordinator, about itself.
struct Hello {
  /// The line before it, with the protocol's version. Its first byte tells a launcher from a client
  /// of the store at the same port.
  static constexpr const char* kGreeting = "syncbn-agent 1\n";

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
