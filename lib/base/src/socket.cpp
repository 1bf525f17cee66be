#include <syncbn/base/socket.h>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>

namespace syncbn::base {
namespace {

using Clock = std::chrono::steady_clock;

// Upper bounds on the time for one address: while others remain, and for the last one.
constexpr std::chrono::seconds kPatience{2};
constexpr std::chrono::seconds kLastPatience{10};

bool is_ipv6(std::string_view host) {
  // % precedes the interface of a link-local address.
  const std::string address(host.substr(0, host.find('%')));
  in6_addr ignored{};
  return ::inet_pton(AF_INET6, address.c_str(), &ignored) == 1;
}

/// A connected socket, or an invalid one and a reason.
UniqueFd connect_to(const addrinfo& address, Deadline deadline, std::string& reason) {
  UniqueFd fd = start_connect(address);
  int error = fd ? 0 : errno;
  if (fd) error = poll_until(fd.get(), POLLOUT, deadline) ? connect_error(fd.get()) : ETIMEDOUT;
  if (error == 0) return fd;
  reason = describe_errno(error);
  return {};
}

}  // namespace

std::optional<HostPort> parse_host_port(std::string_view text) {
  if (is_ipv6(text)) return HostPort{std::string(text), std::nullopt};
  const bool in_brackets = text.starts_with('[');
  const size_t colon = text.find(':', in_brackets ? text.find(']') : 0);
  std::string_view host = text.substr(0, colon);
  if (in_brackets) {
    if (!host.ends_with(']')) return std::nullopt;
    host = host.substr(1, host.size() - 2);
    if (!is_ipv6(host)) return std::nullopt;
  }
  if (host.empty()) return std::nullopt;
  HostPort result{std::string(host), std::nullopt};
  if (colon == std::string_view::npos) return result;
  result.port = parse_number<uint16_t>(text.substr(colon + 1));
  return result.port ? std::optional(result) : std::nullopt;
}

AddressList resolve(const std::string& host, int port, std::string& reason, int flags) {
  addrinfo hints{};
  hints.ai_flags = flags;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  const int error = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
  if (error == 0) return AddressList(list);
  reason = ::gai_strerror(error);
  return nullptr;
}

int port_of(const sockaddr_storage& address) {
  return ntohs(address.ss_family == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                   : reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

std::string peer_address(int fd, bool own) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  auto* const pointer = reinterpret_cast<sockaddr*>(&address);
  const int failed = own ? ::getsockname(fd, pointer, &size) : ::getpeername(fd, pointer, &size);
  if (failed != 0) return "";
  return numeric_address(pointer, size);
}

std::string numeric_address(const sockaddr* address, socklen_t size) {
  std::array<char, NI_MAXHOST> host{};
  if (::getnameinfo(address, size, host.data(), host.size(), nullptr, 0, NI_NUMERICHOST) != 0) {
    return "";
  }
  constexpr std::string_view kMapped = "::ffff:";  // an IPv4 address on an IPv6 socket
  const std::string name = host.data();
  return name.starts_with(kMapped) ? name.substr(kMapped.size()) : name;
}

bool is_loopback(const std::string& host) {
  in_addr address{};
  const bool is_ipv4 = ::inet_pton(AF_INET, host.c_str(), &address) == 1;
  return host == "::1" || host == "localhost" ||
         (is_ipv4 && ntohl(address.s_addr) >> 24 == IN_LOOPBACKNET);
}

int milliseconds_until(Deadline deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 60'000));
}

bool poll_until(int fd, short events, Deadline deadline) {
  for (;;) {
    const int left = milliseconds_until(deadline);
    pollfd ready{fd, events, 0};
    if (::poll(&ready, 1, left) > 0) return true;
    if (left == 0) return false;
  }
}

UniqueFd bind_at(const addrinfo& address, int flags) {
  UniqueFd fd(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | flags, 0));
  const int on = 1;
  if (fd && ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) == 0 &&
      ::bind(fd.get(), address.ai_addr, address.ai_addrlen) == 0) {
    return fd;
  }
  return {};
}

UniqueFd listen_at(const addrinfo& address, int flags) {
  constexpr int kBacklog = 2048;  // all ranks of a job may connect at once
  UniqueFd fd = bind_at(address, flags);
  if (fd && ::listen(fd.get(), kBacklog) == 0) return fd;
  return {};
}

UniqueFd start_connect(const addrinfo& address) {
  UniqueFd fd(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd || ::connect(fd.get(), address.ai_addr, address.ai_addrlen) == 0 ||
      errno == EINPROGRESS) {
    return fd;
  }
  const int error = errno;
  fd.reset();
  errno = error;
  return fd;
}

int connect_error(int fd) {
  int error = 0;
  socklen_t size = sizeof(error);
  if (::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0) return errno;
  return error;
}

void detect_lost_host(int fd) {
  constexpr int kQuietSeconds = 5;
  constexpr int kProbeSeconds = 2;
  constexpr int kProbes = 3;
  // Linux sends no keep-alive probes while sent data is unacknowledged.
  constexpr unsigned kUnansweredMilliseconds = 1000 * (kQuietSeconds + kProbes * kProbeSeconds);
  const int on = 1;
  ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &kQuietSeconds, sizeof(kQuietSeconds));
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &kProbeSeconds, sizeof(kProbeSeconds));
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &kProbes, sizeof(kProbes));
  ::setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &kUnansweredMilliseconds,
               sizeof(kUnansweredMilliseconds));
}

Deadline deadline_of_first(Deadline now, Deadline deadline, size_t addresses) {
  const Deadline share = now + (deadline - now) / static_cast<int64_t>(addresses);
  return std::min(share, now + (addresses > 1 ? kPatience : kLastPatience));
}

UniqueFd connect_to_any(const addrinfo* addresses, Deadline deadline, std::string& reason,
                        const ConnectionCheck& usable) {
  size_t left = 0;
  for (const addrinfo* one = addresses; one != nullptr; one = one->ai_next) ++left;
  for (const addrinfo* one = addresses; one != nullptr; one = one->ai_next) {
    const Deadline patience = deadline_of_first(Clock::now(), deadline, left--);
    UniqueFd fd = connect_to(*one, patience, reason);
    if (fd && (!usable || usable(fd.get(), patience))) return fd;
  }
  return {};
}

}  // namespace syncbn::base
