#include "nodes/master_port.h"

#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <syncbn/base/error.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <thread>

namespace syncbn::launch {
namespace {

// All addresses of both families, as TCPStore listens; machines without IPv6 have one family.
base::UniqueFd bind_all_addresses(int port) {
  const int on = 1;
  const int off = 0;
  base::UniqueFd socket(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (socket) {
    ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    ::setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
    sockaddr_in6 any{};
    any.sin6_family = AF_INET6;
    any.sin6_port = htons(static_cast<uint16_t>(port));
    if (::bind(socket.get(), reinterpret_cast<sockaddr*>(&any), sizeof(any)) == 0) return socket;
    if (errno == EADDRINUSE || errno == EACCES) return {};
  }
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
    base::throw_errno("getsockname");
  }
  // The port stands at the same place in both families.
  return ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

}  // namespace

void throw_port_error(int port) {
  throw base::UnavailableError(
      fmt::format("port {} (--master_port) cannot be used on this machine: {}; choose another, or "
                  "leave --master_port out on a single machine to get a free one",
                  port, std::strerror(errno)));
}

MasterPort MasterPort::hold(int port) {
  MasterPort held;
  held.socket_ = bind_all_addresses(port);
  if (!held.socket_ && port == 0) base::throw_errno("no free TCP port for rank 0");
  if (!held.socket_) throw_port_error(port);
  held.port_ = bound_port(held.socket_.get());
  return held;
}

base::UniqueFd listen_on(int port) {
  // Two processes that come to listen in the same moment are both turned away.
  constexpr int kTries = 10;
  std::minstd_rand random(std::random_device{}());
  for (int i = 0; i < kTries; ++i) {
    base::UniqueFd socket = bind_all_addresses(port);
    if (!socket) return {};
    if (::listen(socket.get(), SOMAXCONN) == 0) return socket;
    if (errno != EADDRINUSE) return {};
    std::this_thread::sleep_for(std::chrono::milliseconds(1 + random() % 20));
  }
  errno = EADDRINUSE;
  return {};
}

bool is_local_address(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), nullptr, &hints, &found) != 0) return false;
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> addresses(found, &::freeaddrinfo);
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
    // Only an address of this machine can be bound.
    const base::UniqueFd probe(::socket(one->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (probe && ::bind(probe.get(), one->ai_addr, one->ai_addrlen) == 0) return true;
  }
  return false;
}

}  // namespace syncbn::launch
