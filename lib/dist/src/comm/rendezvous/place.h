#pragma once

#include <syncbn/base/socket.h>
#include <syncbn/base/unique_fd.h>

#include <cstdint>
#include <optional>
#include <string>

#include <syncbn/dist/process_group.h>

namespace syncbn::dist::detail {

/// The address of a job's store, which rank 0 or a launcher's agent holds.
struct StoreEndpoint {
  std::string host;
  uint16_t port = 0;

  /// @param url tcp://host:port; an IPv6 address in brackets. @throws base::UserError for others.
  static StoreEndpoint parse(const std::string& url);

  std::string str() const;

  struct Listener {
    base::UniqueFd fd;
    std::string address;  ///< numeric
    int error = 0;        ///< EADDRINUSE: the port is in use, and there is no socket
    /// Whether the host's name resolves to this address. False if the name is a service's, which
    /// forwards connections, or if this is the wrong host.
    bool at_host = true;
  };

  /// Listens on one interface: the one with the host's address, or else the one with the address
  /// `other`.
  /// @param several_hosts whether other hosts must reach it: it then listens on `other` if the
  ///   host's name resolves to loopback, as with Debian's 127.0.1.1.
  /// @throws base::UserError for an unknown host, base::UnavailableError unless the port is in use.
  Listener listen(bool several_hosts, const std::string& other) const;

  /// The numeric addresses of a connection to the store.
  struct Route {
    std::string own;
    std::string store;
  };

  /// The route over which a c10d TCPStore answers; empty, with a `reason`, if none does. Returns by
  /// `deadline`, except for the time to resolve the host's name.
  /// @param other a second address to try if is_own_name().
  std::optional<Route> probe(base::Deadline deadline, const std::string& other,
                             std::string& reason) const;

  /// Whether `host` is a name that resolves to loopback, which other hosts cannot reach.
  bool is_own_name() const;
};

/// Whether the launcher says that its agent holds the store.
bool has_agent_store();

/// This process's rank, and where the ranks meet, as given by the environment and the user.
struct Place {
  StoreEndpoint master;
  std::string file;  ///< for file://, in place of `master`
  int rank = 0;
  int world_size = 1;
  bool agent_holds_store = false;
  /// Whether an agent restarts the ranks and the store outlives them, as with torchrun.
  bool is_elastic = false;

  /// @throws base::UserError if the environment or `options` are malformed or incomplete.
  static Place find(const InitOptions& options);

  /// Whether the other ranks expect this process to hold the store.
  bool should_hold_store() const { return rank == 0 && !agent_holds_store && file.empty(); }
  /// Whether the launcher started ranks on other hosts.
  bool on_several_hosts() const;
  std::string meeting_point() const { return file.empty() ? master.str() : file; }
  /// What to do if another job uses the same meeting point.
  std::string how_to_separate_jobs() const;
};

}  // namespace syncbn::dist::detail
