#pragma once

#include <syncbn/base/unique_fd.h>

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

 private:
  base::UniqueFd socket_;
  int port_ = 0;
};

/// @throws base::UnavailableError that tells of errno and what to do.
[[noreturn]] void throw_port_error(int port);

/// A socket that listens on the port, for a launcher that holds the store itself; nothing and errno
/// when another process does.
base::UniqueFd listen_on(int port);

/// Whether `host` is one of this machine's own addresses. False when it cannot be resolved.
bool is_local_address(const std::string& host);

}  // namespace syncbn::launch
