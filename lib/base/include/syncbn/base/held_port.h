#pragma once

#include <syncbn/base/unique_fd.h>

#include <optional>

namespace syncbn::base {

/// A socket bound with SO_REUSEADDR to all addresses of both families, as TCPStore's is. Invalid,
/// with errno, if another process listens on the port.
/// @param port 0: any free one.
UniqueFd bind_all_addresses(int port);

/// The port that a socket is bound to.
int bound_port(int socket);

/// Holds the port that rank 0 will listen on, so that no other job can take it.
///
/// The socket is bound with SO_REUSEADDR and does not listen. The kernel does not assign its port
/// as a free one (bind() to port 0, an outgoing connection). Rank 0 can still bind the port and
/// listen: its TCPStore sets SO_REUSEADDR as well, and one of the sockets with this flag may
/// listen.
class HeldPort {
 public:
  /// std::nullopt, with errno, if another process listens on the port.
  /// @param port 0: any free one.
  static std::optional<HeldPort> hold(int port);

  int port() const { return port_; }

 private:
  UniqueFd socket_;
  int port_ = 0;
};

}  // namespace syncbn::base
