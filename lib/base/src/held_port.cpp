#include <syncbn/base/held_port.h>

#include <netinet/in.h>
#include <syncbn/base/error.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstdint>

namespace syncbn::base {

UniqueFd bind_all_addresses(int port) {
  const int on = 1;
  const int off = 0;
  UniqueFd socket(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (socket) {
    ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    ::setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
    sockaddr_in6 any{};
    any.sin6_family = AF_INET6;
    any.sin6_port = htons(static_cast<uint16_t>(port));
    if (::bind(socket.get(), reinterpret_cast<sockaddr*>(&any), sizeof(any)) == 0) return socket;
    if (errno == EADDRINUSE || errno == EACCES) return {};
  }
  // A machine without IPv6.
  socket.reset(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket) return {};
  ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  sockaddr_in any{};
  any.sin_family = AF_INET;
  any.sin_port = htons(static_cast<uint16_t>(port));
  if (::bind(socket.get(), reinterpret_cast<sockaddr*>(&any), sizeof(any)) == 0) return socket;
  return {};
}

int bound_port(int socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    throw_errno("getsockname");
  }
  // The port is at the same offset in both families.
  return ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

std::optional<HeldPort> HeldPort::hold(int port) {
  HeldPort held;
  held.socket_ = bind_all_addresses(port);
  if (!held.socket_) return std::nullopt;
  held.port_ = bound_port(held.socket_.get());
  return held;
}

}  // namespace syncbn::base
