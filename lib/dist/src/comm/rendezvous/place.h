#pragma once

#include <string>

#include <syncbn/dist/process_group.h>

#include "rendezvous/store_endpoint.h"

namespace syncbn::dist::detail {

/// This process's rank, and where the ranks meet, as given by the environment and the user.
struct Place {
  StoreEndpoint master;
  std::string file;  ///< of file://, instead of `master`
  int rank = 0;
  int world_size = 1;
  bool agent_holds_store = false;

  /// Reads the environment and `options`. @throws base::UserError if they are malformed or
  /// incomplete.
  static Place find(const InitOptions& options);

  /// Whether the other ranks expect this process to hold the store.
  bool should_hold_store() const { return rank == 0 && !agent_holds_store && file.empty(); }
  /// Whether the launcher started ranks on other hosts.
  bool on_several_hosts() const;
  /// For messages.
  std::string meeting_point() const { return file.empty() ? master.str() : file; }
  /// What to do if another job uses the same meeting point.
  std::string how_to_part() const;
};

}  // namespace syncbn::dist::detail
