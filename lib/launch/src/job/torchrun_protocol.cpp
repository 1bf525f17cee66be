#include "job/torchrun_protocol.h"

#include <nlohmann/json.hpp>

#include "common/json_messages.h"

namespace syncbn::launch {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(TorchrunRole, role, rank, local_world_size)

std::string TorchrunRole::str() const {
  return nlohmann::json(*this).dump();
}

std::optional<TorchrunRole> TorchrunRole::parse(const std::string& text) {
  try {
    return parse_json(text).get<TorchrunRole>();
  } catch (const nlohmann::json::exception&) {
    return std::nullopt;
  }
}

void to_json(nlohmann::json& json, const AssignedRanks& ranks) {
  json = {ranks.base, ranks.world_size, ranks.role_base, ranks.role_world_size};
}

void from_json(const nlohmann::json& json, AssignedRanks& ranks) {
  ranks = {json.at(0), json.at(1), json.at(2), json.at(3)};
}

std::map<int, AssignedRanks> assign_ranks(const std::map<int, TorchrunRole>& nodes) {
  int world_size = 0;
  std::map<std::string, int> role_sizes;
  std::map<int, AssignedRanks> ranks;
  for (const auto& [node, workers] : nodes) {
    ranks[node].base = world_size;
    ranks[node].role_base = role_sizes[workers.role];
    world_size += workers.local_world_size;
    role_sizes[workers.role] += workers.local_world_size;
  }
  for (auto& [node, own] : ranks) {
    own.world_size = world_size;
    own.role_world_size = role_sizes[nodes.at(node).role];
  }
  return ranks;
}

}  // namespace syncbn::launch
