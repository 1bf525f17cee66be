#include <syncbn/base/held_port.h>

#include <netinet/in.h>
#include <syncbn/base/error.h>
#include <syncbn/base/socket.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstdint>

namespace syncbn::base {

UniqueFd bind_all_addresses(int port) {
  const int on = 1;
  const int off = 0;
  // AF_INET is for machines without IPv6.
  for (const int family : {AF_INET6, AF_INET}) {
    UniqueFd socket(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!socket) continue;
    ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    ::setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));  // fails for AF_INET
    sockaddr_storage any{};
    any.ss_family = static_cast<sa_family_t>(family);
    // The port is at the same offset in both families.
    reinterpret_cast<sockaddr_in&>(any).sin_port = htons(static_cast<uint16_t>(port));
    const socklen_t size = family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
    if (::bind(socket.get(), reinterpret_cast<sockaddr*>(&any), size) == 0) return socket;
    if (errno == EADDRINUSE || errno == EACCES) return {};
  }
  return {};
}

int bound_port(int socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    throw_errno("getsockname");
  }
  return port_of(address);
}

std::optional<HeldPort> HeldPort::hold(int port) {
  HeldPort held;
  held.socket_ = bind_all_addresses(port);
  if (!held.socket_) return std::nullopt;
  held.port_ = bound_port(held.socket_.get());
  return held;
}

}  // namespace syncbn::base
