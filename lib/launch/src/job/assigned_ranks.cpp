#include "job/assigned_ranks.h"

#include <nlohmann/json.hpp>
#include <string>

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

std::map<int, AssignedRanks> deal_ranks(const std::map<int, TorchrunRole>& nodes) {
  int world_size = 0;
  std::map<std::string, int> role_sizes;
  for (const auto& [node, workers] : nodes) {
    world_size += workers.nproc;
    role_sizes[workers.role] += workers.nproc;
  }
  std::map<int, AssignedRanks> ranks;
  int base = 0;
  std::map<std::string, int> role_bases;
  for (const auto& [node, workers] : nodes) {
    ranks[node] = {base, world_size, role_bases[workers.role], role_sizes[workers.role]};
    base += workers.nproc;
    role_bases[workers.role] += workers.nproc;
  }
  return ranks;
}

}  // namespace syncbn::launch
