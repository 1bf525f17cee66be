#include "job/torchrun_protocol.h"

#include <nlohmann/json.hpp>

#include "common/json_messages.h"

namespace syncbn::launch {

std::string TorchrunRole::str() const {
  return nlohmann::json{{"role", role}, {"rank", node}, {"local_world_size", nproc}}.dump();
}

std::optional<TorchrunRole> TorchrunRole::parse(const std::string& text) {
  const auto json = parse_json(text);
  try {
    return TorchrunRole{json.at("role"), json.at("rank"), json.at("local_world_size")};
  } catch (const nlohmann::json::exception&) {
    return std::nullopt;
  }
}

nlohmann::json AssignedRanks::json() const {
  return {base, world_size, role_base, role_world_size};
}

AssignedRanks AssignedRanks::of(const nlohmann::json& json) {
  return {json.at(0), json.at(1), json.at(2), json.at(3)};
}

std::map<int, AssignedRanks> assign_ranks(const std::map<int, TorchrunRole>& nodes) {
  int world_size = 0;
  std::map<std::string, int> role_sizes;
  std::map<int, AssignedRanks> ranks;
  for (const auto& [node, workers] : nodes) {
    ranks[node].base = world_size;
    ranks[node].role_base = role_sizes[workers.role];
    world_size += workers.nproc;
    role_sizes[workers.role] += workers.nproc;
  }
  for (auto& [node, own] : ranks) {
    own.world_size = world_size;
    own.role_world_size = role_sizes[nodes.at(node).role];
  }
  return ranks;
}

}  // namespace syncbn::launch
