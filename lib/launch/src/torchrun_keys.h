#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

namespace syncbn::launch {

/// The keys by which torchrun's agents meet in a static rendezvous (torch 2.11,
/// torch/distributed/elastic/agent/server/api.py): each writes its role_info, that of node 0 deals
/// out assigned_ranks, and all leave through a barrier.
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
  int node = 0;
  int nproc = 0;

  std::string str() const {
    return nlohmann::json{{"role", role}, {"rank", node}, {"local_world_size", nproc}}.dump();
  }
  /// Nothing when it is not what an agent writes.
  static std::optional<TorchrunRole> parse(const std::string& text) {
    const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
    try {
      return TorchrunRole{json.at("role"), json.at("rank"), json.at("local_world_size")};
    } catch (const nlohmann::json::exception&) {
      return std::nullopt;
    }
  }
};

}  // namespace syncbn::launch
