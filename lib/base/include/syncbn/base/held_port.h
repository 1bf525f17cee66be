#pragma once

#include <syncbn/base/unique_fd.h>

#include <optional>

namespace syncbn::base {

/// A socket that is bound to all addresses of both families, as TCPStore listens, with
/// SO_REUSEADDR; nothing and errno when another process listens on the port. `port` 0: a free one.
UniqueFd bind_all_addresses(int port);

/// The port that a socket is bound to.
int bound_port(int socket);

/// The port that rank 0 will listen on, held for as long as this object lives.
///
/// Held means bound with SO_REUSEADDR, never listening. Then the kernel gives the port to nobody
/// who asks for a free one (another launcher's bind to port 0, any outgoing connection), while
/// rank 0, whose TCPStore sets SO_REUSEADDR too, can still bind it and listen: of sockets that all
/// have the flag, one may listen. So there is no moment at which another job could take it.
class HeldPort {
 public:
  /// `port` 0 takes a free one. Nothing and errno when another process listens on it.
  static std::optional<HeldPort> hold(int port);

  int port() const { return port_; }

 private:
  UniqueFd socket_;
  int port_ = 0;
};

}  // namespace syncbn::base
