#pragma once

#include <netdb.h>
#include <syncbn/base/unique_fd.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace syncbn::base {

/// Of a socket to which all ranks of a job may connect at once.
inline constexpr int kListenBacklog = 2048;

/// An address as users write it: "host" or "host:port"; an IPv6 address stands in brackets where a
/// port follows.
struct HostPort {
  std::string host;         ///< without brackets
  std::optional<int> port;  ///< 0 to 65535
};

/// Nothing when the text is something else.
std::optional<HostPort> parse_host_port(std::string_view text);

struct AddressListDeleter {
  void operator()(addrinfo* list) const { ::freeaddrinfo(list); }
};
using AddressList = std::unique_ptr<addrinfo, AddressListDeleter>;

/// The host's addresses for streams. Null and a reason if the name is unknown, perhaps only for
/// now. May wait long for a name server, unless `flags`, as in addrinfo, contains AI_NUMERICHOST.
AddressList resolve(const std::string& host, int port, std::string& reason, int flags = 0);

/// Of an IPv4 or IPv6 address.
int port_of(const sockaddr_storage& address);

using Deadline = std::chrono::steady_clock::time_point;

/// For poll(): the time until then, rounded up, at most a minute; 0 when it has passed.
int milliseconds_until(Deadline deadline);

/// Whether one of `events`, those of poll(), or an error comes by the deadline. Looks at least
/// once.
bool poll_until(int fd, short events, Deadline deadline);

/// A non-blocking socket on its way to the address: writable once it is there or has failed, which
/// connect_error() tells apart. Nothing and errno when it cannot even set out.
UniqueFd start_connect(const addrinfo& address);

/// 0, or the errno with which the connection failed.
int connect_error(int fd);

/// Makes the connection fail with ETIMEDOUT when the peer's host does not answer for 11 seconds: a
/// host that lost its power or its network closes nothing.
void detect_lost_host(int fd);

/// When to give up the first of so many addresses. One of them may lead nowhere without an error,
/// such as IPv6 behind a router that drops it: the others need time as well.
Deadline patience_with_first(Deadline now, Deadline deadline, size_t addresses);

/// Looks at a connection, and has until the deadline.
using ConnectionCheck = std::function<bool(int fd, Deadline deadline)>;

/// A connected, non-blocking socket to the first address of the list that answers, and whose
/// connection `usable` accepts. Nothing and a reason by the deadline otherwise; `usable` gives its
/// own.
UniqueFd connect_to_any(const addrinfo* addresses, Deadline deadline, std::string& reason,
                        const ConnectionCheck& usable = {});

}  // namespace syncbn::base
