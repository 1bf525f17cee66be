#include "store_endpoint.h"

#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <syncbn/base/error.h>
#include <syncbn/base/socket.h>
#include <syncbn/base/store_greeting.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string_view>

namespace syncbn::dist::detail {
namespace {

constexpr int kListenBacklog = 2048;

std::string numeric(const sockaddr* address, socklen_t size) {
  std::array<char, NI_MAXHOST> host;
  if (::getnameinfo(address, size, host.data(), host.size(), nullptr, 0, NI_NUMERICHOST) != 0) {
    return "";
  }
  return host.data();
}

/// @param name getsockname or getpeername.
template <typename Name>
std::string numeric_end(int fd, Name name) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  return name(fd, generic, &size) == 0 ? numeric(generic, size) : "";
}

bool answers_as_store(int fd, base::Deadline deadline) {
  constexpr uint32_t kNonce = 0x6e636273;
  const std::string greeting = base::store_greeting(kNonce);
  const ssize_t sent = ::send(fd, greeting.data(), greeting.size(), MSG_NOSIGNAL);
  if (sent != static_cast<ssize_t>(greeting.size())) return false;
  std::array<char, sizeof(kNonce)> answer;
  for (size_t got = 0; got < answer.size();) {
    if (!base::poll_until(fd, POLLIN, deadline)) return false;
    const ssize_t more = ::recv(fd, &answer[got], answer.size() - got, 0);
    if (more <= 0) return false;
    got += static_cast<size_t>(more);
  }
  return std::memcmp(answer.data(), &kNonce, sizeof(kNonce)) == 0;
}

}  // namespace

StoreEndpoint StoreEndpoint::parse(const std::string& url) {
  constexpr std::string_view kScheme = "tcp://";
  const auto place = base::parse_host_port(std::string_view(url).substr(kScheme.size()));
  if (!place || place->port.value_or(0) == 0) {
    throw base::UserError(fmt::format("init_method '{}' is not tcp://host:port", url));
  }
  return {place->host, static_cast<uint16_t>(*place->port)};
}

std::string StoreEndpoint::str() const {
  return fmt::format("{}:{}", host, port);
}

base::UniqueFd StoreEndpoint::listen(bool several_hosts) const {
  std::string reason;
  const base::AddressList list = base::resolve(host, port, reason);
  if (!list) {
    throw base::UserError(fmt::format("MASTER_ADDR={} cannot be resolved: {}", host, reason));
  }
  // A host's own name often leads to loopback (Debian's 127.0.1.1): other hosts need more.
  const bool loopback = is_loopback(numeric(list->ai_addr, list->ai_addrlen)) &&
                        (is_loopback(host) || !several_hosts);
  sockaddr_in6 any{};
  any.sin6_family = AF_INET6;
  any.sin6_port = htons(port);
  const sockaddr* address = list->ai_addr;
  socklen_t size = list->ai_addrlen;
  int family = list->ai_family;
  if (!loopback) {
    address = reinterpret_cast<const sockaddr*>(&any);
    size = sizeof(any);
    family = AF_INET6;
  }
  base::UniqueFd fd(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in any4{};
  if (!fd && !loopback) {  // a host without IPv6
    any4.sin_family = AF_INET;
    any4.sin_port = htons(port);
    address = reinterpret_cast<const sockaddr*>(&any4);
    size = sizeof(any4);
    fd.reset(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  }
  const int on = 1;
  const int off = 0;
  if (!fd) base::throw_errno("cannot make a socket");
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (address->sa_family == AF_INET6) {
    ::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
  }
  if (::bind(fd.get(), address, size) != 0 || ::listen(fd.get(), kListenBacklog) != 0) {
    throw base::UnavailableError(fmt::format(
        "rank 0 cannot listen on {}: {}{}", str(), std::strerror(errno),
        errno == EADDRINUSE ? "; another program holds the port, or two workers have rank 0: "
                              "choose another MASTER_PORT, or check the ranks"
                            : ""));
  }
  return fd;
}

std::optional<StoreEndpoint::Route> StoreEndpoint::probe(base::Deadline deadline,
                                                         std::string& reason) const {
  const base::AddressList list = base::resolve(host, port, reason);
  const base::UniqueFd fd = base::connect_to_any(
      list.get(), deadline, reason, [&](int connection, base::Deadline patience) {
        if (answers_as_store(connection, patience)) return true;
        reason = "what listens there does not answer as a store of torch does";
        return false;
      });
  if (!fd) return std::nullopt;
  return Route{numeric_end(fd.get(), ::getsockname), numeric_end(fd.get(), ::getpeername)};
}

bool is_loopback(const std::string& address) {
  return address.starts_with("127.") || address == "::1" || address == "localhost";
}

std::string outside_address() {
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return "";
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(all, ::freeifaddrs);
  for (const ifaddrs* one = all; one != nullptr; one = one->ifa_next) {
    const bool usable = one->ifa_addr != nullptr && one->ifa_addr->sa_family == AF_INET &&
                        (one->ifa_flags & IFF_UP) != 0 && (one->ifa_flags & IFF_LOOPBACK) == 0;
    if (usable) return numeric(one->ifa_addr, sizeof(sockaddr_in));
  }
  return "";
}

}  // namespace syncbn::dist::detail
