#include "assigned_ranks.h"

#include <nlohmann/json.hpp>

namespace syncbn::launch {

nlohmann::json AssignedRanks::json() const {
  return {base, world_size, role_base, role_world_size};
}

AssignedRanks AssignedRanks::of(const nlohmann::json& json) {
  return {json.at(0), json.at(1), json.at(2), json.at(3)};
}

std::optional<AssignedRanks> AssignedRanks::parse(const nlohmann::json& json) {
  try {
    return of(json);
  } catch (const nlohmann::json::exception&) {
    return std::nullopt;
  }
}

}  // namespace syncbn::launch
