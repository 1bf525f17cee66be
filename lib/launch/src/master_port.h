#pragma once

#include <syncbn/base/unique_fd.h>
#include <syncbn/launch/options.h>

#include <string>

namespace syncbn::launch {

/// The port that rank 0 will listen on, held for as long as this object lives.
///
/// Held means bound with SO_REUSEADDR, never listening. Then the kernel gives the port to nobody
/// who asks for a free one (another launcher's bind to port 0, any outgoing connection), while
/// rank 0, whose TCPStore sets SO_REUSEADDR too, can still bind it and listen: of sockets that all
/// have the flag, one may listen. So there is no moment at which another job could take it.
class MasterPort {
 public:
  /// `port` 0 takes a free one. @throws UnavailableError when another process listens on it.
  static MasterPort hold(int port);

  int port() const { return port_; }

  /// The socket, listening now: for a launcher that holds the store itself.
  base::UniqueFd listen() &&;

 private:
  base::UniqueFd socket_;
  int port_ = 0;
};

/// Whether `host` is one of this machine's own addresses. False when it cannot be resolved.
bool is_local_address(const std::string& host);

}  // namespace syncbn::launch
