#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

namespace syncbn::launch {

/// Where the workers of one node stand among all.
struct AssignedRanks {
  int base = 0;  ///< the global rank of local rank 0
  int world_size = 1;
  int role_base = 0;  ///< and its rank among the workers of its role
  int role_world_size = 1;

  /// As torchrun writes them under its key of this name, and our launchers to each other.
  nlohmann::json json() const { return {base, world_size, role_base, role_world_size}; }
  /// @throws nlohmann's exceptions when it is not what json() gives.
  static AssignedRanks of(const nlohmann::json& json) {
    return {json.at(0), json.at(1), json.at(2), json.at(3)};
  }
  /// Nothing when it is not.
  static std::optional<AssignedRanks> parse(const nlohmann::json& json) {
    try {
      return of(json);
    } catch (const nlohmann::json::exception&) {
      return std::nullopt;
    }
  }
};

}  // namespace syncbn::launch
