#pragma once

#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <utility>

namespace syncbn::launch {

// What torchrun's agents write into the store in a static rendezvous (torch 2.11,
// torch/distributed/elastic/agent/server/api.py): each agent writes its role_info, the agent of
// node 0 answers with assigned_ranks, and all leave through a barrier.

class TorchrunKeys {
 public:
  explicit TorchrunKeys(std::string run_id) : prefix_(std::move(run_id) + "/torchelastic/") {}

  std::string role_info(int node) const { return prefix_ + "role_info/" + std::to_string(node); }
  std::string assigned_ranks(int node) const {
    return prefix_ + "assigned_ranks/" + std::to_string(node);
  }
  std::string members() const { return prefix_ + "agent/terminal_state/num_members"; }
  std::string last_member() const { return prefix_ + "agent/terminal_state/last_member"; }

 private:
  std::string prefix_;
};

/// The value of role_info.
struct TorchrunRole {
  std::string role;
  int rank = 0;  ///< of the node
  int local_world_size = 0;

  std::string str() const;
  /// Empty if the text is not a role_info.
  static std::optional<TorchrunRole> parse(const std::string& text);
};

/// The value of assigned_ranks: the ranks of one node's workers. Launchers of syncbn send it to
/// each other as well.
struct AssignedRanks {
  int base = 0;  ///< the global rank of local rank 0
  int world_size = 1;
  int role_base = 0;  ///< the rank of local rank 0 among the workers of its role
  int role_world_size = 1;
};

void to_json(nlohmann::json& json, const AssignedRanks& ranks);
void from_json(const nlohmann::json& json, AssignedRanks& ranks);

/// Numbers the workers of all nodes in the order of the nodes' ranks, which are the keys.
std::map<int, AssignedRanks> assign_ranks(const std::map<int, TorchrunRole>& nodes);

}  // namespace syncbn::launch
