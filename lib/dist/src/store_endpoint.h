#pragma once

#include <syncbn/base/socket.h>
#include <syncbn/base/unique_fd.h>

#include <cstdint>
#include <optional>
#include <string>

namespace syncbn::dist::detail {

/// The address at which rank 0, or a launcher's agent, keeps the store of a job.
struct StoreEndpoint {
  std::string host;
  uint16_t port = 0;

  /// @param url tcp://host:port; an IPv6 address stands in brackets.
  /// @throws base::UserError when it is something else.
  static StoreEndpoint parse(const std::string& url);

  std::string str() const;

  /// A listening socket, made by us so that a taken port gets our message, and so that a job on one
  /// host listens on loopback only.
  /// @throws base::UserError when the host is not known, base::UnavailableError when the port is
  ///   taken.
  base::UniqueFd listen(bool several_hosts) const;

  /// The numeric addresses of a connection to the store.
  struct Route {
    std::string own;
    std::string store;
  };

  /// Whether c10d's TCPStore answers there, and on which way. Otherwise nothing, and why in
  /// `reason`. Returns by `deadline`, but for the time it takes to resolve the host's name.
  std::optional<Route> probe(base::Deadline deadline, std::string& reason) const;
};

/// Of a name or a numeric address.
bool is_loopback(const std::string& address);

/// The address of an interface that is up, for a host whose own name leads to loopback only;
/// empty: there is none.
std::string outside_address();

}  // namespace syncbn::dist::detail
