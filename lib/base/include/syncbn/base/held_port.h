#pragma once

#include <syncbn/base/unique_fd.h>

#include <optional>

namespace syncbn::base {

/// A socket that is bound to all addresses of both families, as TCPStore listens, with
/// SO_REUSEADDR. Invalid, with errno, if another process listens on the port. `port` 0: any free
/// one.
UniqueFd bind_all_addresses(int port);

/// The port that a socket is bound to.
int bound_port(int socket);

/// Holds the port that rank 0 will listen on, so that no other job can take it.
///
/// A held port is bound with SO_REUSEADDR, and does not listen. The kernel does not assign it as a
/// free port (bind() to port 0, an outgoing connection). Rank 0 can still bind it and listen: its
/// TCPStore sets SO_REUSEADDR as well, and of sockets that all have the flag one may listen.
class HeldPort {
 public:
  /// `port` 0: any free one. Empty, with errno, if another process listens on it.
  static std::optional<HeldPort> hold(int port);

  int port() const { return port_; }

 private:
  UniqueFd socket_;
  int port_ = 0;
};

}  // namespace syncbn::base
