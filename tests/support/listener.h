#pragma once

#include <netinet/in.h>
#include <syncbn/base/error.h>
#include <syncbn/base/unique_fd.h>
#include <sys/socket.h>

namespace syncbn::test {

/// A bound port without a listener: connections to it are refused.
struct BoundPort {
  /// @param wanted 0: any free port.
  explicit BoundPort(int wanted = 0, in_addr_t host = INADDR_LOOPBACK)
      : fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const int on = 1;
    ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(host);
    address.sin_port = htons(static_cast<uint16_t>(wanted));
    socklen_t size = sizeof(address);
    auto* generic = reinterpret_cast<sockaddr*>(&address);
    if (::bind(fd.get(), generic, size) != 0 || ::getsockname(fd.get(), generic, &size) != 0) {
      base::throw_errno("bind");
    }
    port = ntohs(address.sin_port);
  }

  base::UniqueFd fd;
  int port = 0;
};

/// A port with a listener that never accepts.
struct Listener : BoundPort {
  explicit Listener(int wanted = 0, in_addr_t host = INADDR_LOOPBACK) : BoundPort(wanted, host) {
    if (::listen(fd.get(), SOMAXCONN) != 0) base::throw_errno("listen");
  }
};

}  // namespace syncbn::test
