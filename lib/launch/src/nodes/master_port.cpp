#include "nodes/master_port.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/random.h>
#include <syncbn/base/socket.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

namespace syncbn::launch {

void throw_port_error(int port) {
  throw base::UnavailableError(
      fmt::format("port {} (--master_port) cannot be used on this machine: {}; choose another, or "
                  "leave --master_port out on a single machine to get a free one",
                  port, std::strerror(errno)));
}

base::HeldPort hold_port(int port) {
  auto held = base::HeldPort::hold(port);
  if (held) return *std::move(held);
  if (port == 0) base::throw_errno("no free TCP port for rank 0");
  throw_port_error(port);
}

base::UniqueFd listen_on(int port) {
  // If two processes call listen() at the same moment, both may fail.
  constexpr int kTries = 10;
  for (int i = 0; i < kTries; ++i) {
    base::UniqueFd socket = base::bind_all_addresses(port);
    if (!socket) return {};
    if (::listen(socket.get(), SOMAXCONN) == 0) return socket;
    if (errno != EADDRINUSE) return {};
    std::this_thread::sleep_for(std::chrono::milliseconds(1 + base::random_bits() % 20));
  }
  errno = EADDRINUSE;
  return {};
}

bool is_local_address(const std::string& host) {
  std::string ignored;
  const base::AddressList addresses = base::resolve(host, 0, ignored);
  for (const addrinfo* one = addresses.get(); one != nullptr; one = one->ai_next) {
    // Only an address of this machine can be bound.
    const base::UniqueFd probe(::socket(one->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (probe && ::bind(probe.get(), one->ai_addr, one->ai_addrlen) == 0) return true;
  }
  return false;
}

}  // namespace syncbn::launch
