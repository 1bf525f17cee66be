#include "nodes/master_port.h"

#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <resolv.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/random.h>
#include <syncbn/base/socket.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <set>
#include <thread>

namespace syncbn::launch {
namespace {

// Calls `visit` with the name and the numeric address of each interface that has one.
void for_each_interface(
    const std::function<void(const ifaddrs&, const std::string& address)>& visit) {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return;
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> all(list, &::freeifaddrs);
  for (const ifaddrs* one = list; one != nullptr; one = one->ifa_next) {
    const int family = one->ifa_addr == nullptr ? AF_UNSPEC : one->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    const socklen_t size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    const std::string address = base::numeric_address(one->ifa_addr, size);
    if (!address.empty()) visit(*one, address);
  }
}

// The IPv4 address if there is one; empty if there is no such interface, or it has no address.
std::string address_of_interface(const std::string& name) {
  std::string found;
  for_each_interface([&](const ifaddrs& interface, const std::string& address) {
    if (name != interface.ifa_name) return;
    if (found.empty() || interface.ifa_addr->sa_family == AF_INET) found = address;
  });
  return found;
}

}  // namespace

void throw_port_error(int port) {
  throw base::UnavailableError(fmt::format(
      "port {} (--master_port) cannot be used on this machine: {}; choose another, or "
      "leave --master_port out on a single machine to get a free one; of the nodes of a "
      "job, only one has --node_rank=0",
      port, std::strerror(errno)));
}

base::HeldPort hold_port(int port) {
  auto held = base::HeldPort::hold(port);
  if (held) return *std::move(held);
  if (port == 0) base::throw_errno("no free TCP port for rank 0");
  throw_port_error(port);
}

std::string listen_address(const LaunchOptions& options) {
  if (options.listen.empty()) {
    // Any other name may be a loopback address on this host only, as a host's own is on Debian.
    if (options.master_addr == "localhost") return "127.0.0.1";
    return base::is_loopback(options.master_addr) ? options.master_addr : "";
  }
  std::string address = address_of_interface(options.listen);
  if (!address.empty()) return address;
  if (is_local_address(options.listen)) return options.listen;
  throw base::UserError(fmt::format(
      "--listen={}: neither an address nor a network interface of this machine", options.listen));
}

base::UniqueFd listen_on(int port, const std::string& address) {
  base::AddressList found;
  if (!address.empty()) {
    std::string ignored;
    found = base::resolve(address, port, ignored);
    if (!found) {
      errno = EADDRNOTAVAIL;
      return {};
    }
  }
  // If two processes call listen() at the same moment, both may fail.
  constexpr int kTries = 10;
  for (int i = 0; i < kTries; ++i) {
    base::UniqueFd socket = found ? base::bind_at(*found) : base::bind_all_addresses(port);
    if (!socket) return {};
    if (::listen(socket.get(), SOMAXCONN) == 0) return socket;
    if (errno != EADDRINUSE) return {};
    std::this_thread::sleep_for(std::chrono::milliseconds(1 + base::random_bits() % 20));
  }
  errno = EADDRINUSE;
  return {};
}

std::vector<std::string> own_addresses() {
  std::vector<std::string> all;
  for_each_interface([&all](const ifaddrs& interface, const std::string& address) {
    if ((interface.ifa_flags & IFF_LOOPBACK) == 0) all.push_back(address);
  });
  return all;
}

std::string own_name(const LaunchOptions& options) {
  return options.local_addr.empty() ? base::hostname() : options.local_addr;
}

void limit_name_lookups() {
  // glibc keeps what a program sets in _res after res_init().
  if (::res_init() != 0) return;
  _res.retrans = 2;  // seconds
  _res.retry = 2;
}

bool is_local_address(const std::string& host) {
  std::string ignored;
  return is_local_address(host, ignored);
}

bool is_local_address(const std::string& host, std::string& reason) {
  const base::AddressList addresses = base::resolve(host, 0, reason);
  std::set<std::string> own{"0.0.0.0", "::"};  // the wildcard addresses
  // Not bind(): with net.ipv4.ip_nonlocal_bind=1 every address can be bound. Addresses of a local
  // route without an interface count as foreign.
  for_each_interface([&own](const ifaddrs&, const std::string& address) { own.insert(address); });
  for (const addrinfo* one = addresses.get(); one != nullptr; one = one->ai_next) {
    const std::string address = base::numeric_address(one->ai_addr, one->ai_addrlen);
    if (base::is_loopback(address) || own.contains(address)) return true;
  }
  return false;
}

}  // namespace syncbn::launch
