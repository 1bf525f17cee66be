#pragma once

#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>

#include "job/torchrun_keys.h"

namespace syncbn::launch {

/// Where the workers of one node stand among all.
struct AssignedRanks {
  int base = 0;  ///< the global rank of local rank 0
  int world_size = 1;
  int role_base = 0;  ///< and its rank among the workers of its role
  int role_world_size = 1;

  /// As torchrun writes them under its key of this name, and our launchers to each other.
  nlohmann::json json() const;
  /// @throws nlohmann's exceptions when it is not what json() gives.
  static AssignedRanks of(const nlohmann::json& json);
  /// Nothing when it is not.
  static std::optional<AssignedRanks> parse(const nlohmann::json& json);
};

/// The ranks of all nodes' workers, by node rank, in whose order they are dealt out.
std::map<int, AssignedRanks> deal_ranks(const std::map<int, TorchrunRole>& nodes);

}  // namespace syncbn::launch
