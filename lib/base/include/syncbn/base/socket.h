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

/// An address as users write it: "host" or "host:port"; an IPv6 address before a port needs
/// brackets.
struct HostPort {
  std::string host;         ///< without brackets
  std::optional<int> port;  ///< 0 to 65535
};

/// std::nullopt if the text is not such an address.
std::optional<HostPort> parse_host_port(std::string_view text);

struct AddressListDeleter {
  void operator()(addrinfo* list) const { ::freeaddrinfo(list); }
};
using AddressList = std::unique_ptr<addrinfo, AddressListDeleter>;

/// The host's addresses for stream sockets. Null and a reason if the lookup fails, perhaps only
/// temporarily. May wait long for a name server, unless `flags` (of addrinfo) has AI_NUMERICHOST.
AddressList resolve(const std::string& host, int port, std::string& reason, int flags = 0);

int port_of(const sockaddr_storage& address);

/// The address of the other end of a connection (or, with `own`, of this end), without its port.
/// Empty if the socket is not connected.
std::string peer_address(int fd, bool own = false);

/// "10.0.0.3", for an IPv4 address on an IPv6 socket as well; empty if it is no address.
std::string numeric_address(const sockaddr* address, socklen_t size);

/// @param host an address or "localhost"; other names are not looked up.
bool is_loopback(const std::string& host);

using Deadline = std::chrono::steady_clock::time_point;

/// A timeout for poll(): the time left, rounded up, at most one minute; 0 after the deadline.
int milliseconds_until(Deadline deadline);

/// Waits for one of `events` or an error; false after the deadline. Polls at least once.
bool poll_until(int fd, short events, Deadline deadline);

/// A socket bound to the address, with SO_REUSEADDR; invalid, with errno, on failure.
/// @param flags of socket(), such as SOCK_NONBLOCK.
UniqueFd bind_at(const addrinfo& address, int flags = 0);

/// Such a socket that listens; invalid, with errno, on failure.
UniqueFd listen_at(const addrinfo& address, int flags = 0);

/// Starts to connect a non-blocking socket. It becomes writable when the connection is established
/// or has failed; connect_error() tells which. Invalid, with errno, if connect() fails at once.
UniqueFd start_connect(const addrinfo& address);

/// 0 if the socket is connected, else the errno of the failure.
int connect_error(int fd);

/// Makes the connection fail with ETIMEDOUT if the peer's host does not answer for 11 seconds. A
/// host that loses power or its network closes no connections.
void detect_lost_host(int fd);

/// When to give up the first of several addresses, so that time is left for the others: an address
/// may fail without an error, such as an IPv6 address behind a router that drops IPv6.
Deadline deadline_of_first(Deadline now, Deadline deadline, size_t addresses);

/// Whether a connection is usable. Must return by the deadline.
using ConnectionCheck = std::function<bool(int fd, Deadline deadline)>;

/// Connects to the first address that answers and passes the check `usable`. Returns a non-blocking
/// socket; if no address does by the deadline, an invalid one and a reason, which `usable` may set.
UniqueFd connect_to_any(const addrinfo* addresses, Deadline deadline, std::string& reason,
                        const ConnectionCheck& usable = {});

}  // namespace syncbn::base
