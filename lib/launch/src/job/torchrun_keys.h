#pragma once

#include <optional>
#include <string>
#include <utility>

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

  std::string str() const;
  /// Nothing when it is not what an agent writes.
  static std::optional<TorchrunRole> parse(const std::string& text);
};

}  // namespace syncbn::launch
