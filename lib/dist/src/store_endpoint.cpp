#include "store_endpoint.h"

#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <syncbn/base/error.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>
#include <string_view>

namespace syncbn::dist::detail {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kListenBacklog = 2048;
// A store that is alive answers at once; of one that does not, the next probe may find more.
constexpr std::chrono::seconds kAnswerPatience{10};

struct AddressListDeleter {
  void operator()(addrinfo* list) const { ::freeaddrinfo(list); }
};
using AddressList = std::unique_ptr<addrinfo, AddressListDeleter>;

/// Null and a reason when the name is not known, which may be so only for a while.
AddressList resolve(const StoreEndpoint& endpoint, std::string& reason) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  const int error =
      ::getaddrinfo(endpoint.host.c_str(), std::to_string(endpoint.port).c_str(), &hints, &list);
  if (error != 0) reason = ::gai_strerror(error);
  return AddressList(error == 0 ? list : nullptr);
}

std::string numeric(const sockaddr* address, socklen_t size) {
  std::array<char, NI_MAXHOST> host;
  if (::getnameinfo(address, size, host.data(), host.size(), nullptr, 0, NI_NUMERICHOST) != 0) {
    return "";
  }
  return host.data();
}

bool wait_for(int fd, short events, Clock::time_point deadline) {
  for (;;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    pollfd ready{fd, events, 0};
    const int found = ::poll(&ready, 1, static_cast<int>(std::clamp<int64_t>(left, 0, 60'000)));
    if (found > 0) return true;
    if (left <= 0) return false;
  }
}

/// A connected, non-blocking socket; nothing and errno otherwise.
base::UniqueFd connect_to(const addrinfo& address, Clock::time_point deadline) {
  base::UniqueFd fd(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd || ::connect(fd.get(), address.ai_addr, address.ai_addrlen) == 0) return fd;
  int error = errno;
  if (error == EINPROGRESS) {
    error = ETIMEDOUT;
    socklen_t size = sizeof(error);
    if (wait_for(fd.get(), POLLOUT, deadline)) {
      ::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size);
    }
  }
  if (error == 0) return fd;
  errno = error;
  return {};
}

/// The greeting of TCPStore's protocol (TCPStoreBackend.hpp): a magic number, then a ping, which
/// comes back.
bool answers_as_store(int fd, Clock::time_point deadline) {
  constexpr uint8_t kValidate = 0;
  constexpr uint8_t kPing = 13;
  constexpr uint32_t kMagic = 0x3C85F7CE;
  constexpr uint32_t kNonce = 0x6e636273;
  std::array<char, 10> greeting;
  greeting[0] = kValidate;
  std::memcpy(&greeting[1], &kMagic, sizeof(kMagic));
  greeting[5] = kPing;
  std::memcpy(&greeting[6], &kNonce, sizeof(kNonce));
  constexpr auto kSize = static_cast<ssize_t>(greeting.size());
  if (::send(fd, greeting.data(), greeting.size(), MSG_NOSIGNAL) != kSize) return false;
  std::array<char, sizeof(kNonce)> answer;
  for (size_t got = 0; got < answer.size();) {
    if (!wait_for(fd, POLLIN, deadline)) return false;
    const ssize_t more = ::recv(fd, &answer[got], answer.size() - got, 0);
    if (more <= 0) return false;
    got += static_cast<size_t>(more);
  }
  return std::memcmp(answer.data(), &kNonce, sizeof(kNonce)) == 0;
}

}  // namespace

StoreEndpoint StoreEndpoint::parse(const std::string& url) {
  const std::string_view rest = std::string_view(url).substr(std::strlen("tcp://"));
  const size_t colon = rest.rfind(':');
  StoreEndpoint endpoint;
  int port = 0;
  if (colon != std::string_view::npos) {
    endpoint.host = rest.substr(0, colon);
    const std::string_view digits = rest.substr(colon + 1);
    std::from_chars(digits.data(), digits.data() + digits.size(), port);
  }
  std::string& host = endpoint.host;
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  if (host.empty() || port < 1 || port > 65535) {
    throw base::UserError(fmt::format("init_method '{}' is not tcp://host:port", url));
  }
  endpoint.port = static_cast<uint16_t>(port);
  return endpoint;
}

std::string StoreEndpoint::str() const {
  return fmt::format("{}:{}", host, port);
}

base::UniqueFd StoreEndpoint::listen(bool several_hosts) const {
  std::string reason;
  const AddressList list = resolve(*this, reason);
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

std::optional<std::string> StoreEndpoint::probe(Clock::time_point deadline,
                                                std::string& reason) const {
  const AddressList list = resolve(*this, reason);
  for (const addrinfo* one = list.get(); one != nullptr; one = one->ai_next) {
    const base::UniqueFd fd = connect_to(*one, deadline);
    if (!fd) {
      reason = std::strerror(errno);
      continue;
    }
    if (!answers_as_store(fd.get(), std::min(deadline, Clock::now() + kAnswerPatience))) {
      reason = "what listens there does not answer as a store of torch does";
      continue;
    }
    sockaddr_storage own{};
    socklen_t size = sizeof(own);
    ::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&own), &size);
    return numeric(reinterpret_cast<const sockaddr*>(&own), size);
  }
  return std::nullopt;
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
