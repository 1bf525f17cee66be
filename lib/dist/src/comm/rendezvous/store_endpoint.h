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

  /// Where rank 0 listens for the others.
  struct Listener {
    base::UniqueFd fd;
    std::string address;  ///< numeric
    int error = 0;        ///< EADDRINUSE: the port is taken, and there is no socket
    /// Whether the host's name leads there. It does not where it is a service's, which passes
    /// connections on; nor where this is the wrong host.
    bool at_host = true;
  };

  /// A listening socket, made by us so that it is on one interface only: the one that has the
  /// host's address, or else the one with the address `other`.
  /// @param several_hosts whether others must reach it: where the host's name leads to loopback, as
  ///   Debian's 127.0.1.1 does, it is then on `other` as well.
  /// @throws base::UserError when the host is not known, base::UnavailableError for any failure but
  ///   a port that is taken.
  Listener listen(bool several_hosts, const std::string& other) const;

  /// The numeric addresses of a connection to the store.
  struct Route {
    std::string own;
    std::string store;
  };

  /// Whether c10d's TCPStore answers there, and on which way. Otherwise nothing, and why in
  /// `reason`. Returns by `deadline`, but for the time it takes to resolve the host's name.
  /// @param other where to look, too, when is_own_name().
  std::optional<Route> probe(base::Deadline deadline, const std::string& other,
                             std::string& reason) const;

  /// Whether it is a host's own name that leads to its loopback interface, as on Debian: what other
  /// hosts reach is another address.
  bool is_own_name() const;
};

}  // namespace syncbn::dist::detail
