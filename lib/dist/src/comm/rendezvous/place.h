#pragma once

#include <string>

#include <syncbn/dist/process_group.h>

#include "rendezvous/store_endpoint.h"

namespace syncbn::dist::detail {

/// What a process was told of its job: who it is, and where the ranks meet.
struct Place {
  StoreEndpoint master;
  std::string file;  ///< in place of `master`, of file://
  int rank = 0;
  int world_size = 1;
  bool agent_holds_store = false;

  /// Reads the environment and the URL of `options`.
  /// @throws base::UserError when they are malformed or incomplete.
  static Place find(const InitOptions& options);

  /// Whether it is this process that others expect to keep the store.
  bool should_hold_store() const { return rank == 0 && !agent_holds_store && file.empty(); }
  /// Whether the launcher says that some ranks are on other hosts.
  bool on_several_hosts() const;
  /// Where the ranks meet, for messages.
  std::string meeting_point() const { return file.empty() ? master.str() : file; }
  /// What to do when another job is found there.
  std::string how_to_part() const;
};

}  // namespace syncbn::dist::detail
