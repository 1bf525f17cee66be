#pragma once

#include <sys/socket.h>

#include <string>
#include <vector>

namespace syncbn::dist::detail {

/// The numeric address of a network interface: IPv4 where it has one, as PyTorch chooses, else
/// IPv6.
/// @param source where the name comes from, for the message.
/// @throws base::UserError listing the interfaces there are.
std::string interface_address(const std::string& name, const std::string& source);

/// The addresses of the interfaces that the user chose: `option`, else GLOO_SOCKET_IFNAME, which
/// may be a list with commas. Empty: none was chosen.
std::vector<std::string> chosen_addresses(const std::string& option);

/// NCCL finds its interface by the variable NCCL_SOCKET_IFNAME alone: sets it to `option`, unless
/// that is empty or the user has set it.
void tell_nccl_interface(const std::string& option);

/// This host's address on the default route, else that of an interface that is up and not loopback:
/// for a host whose own name leads to loopback only. Empty: there is none.
std::string outside_address();

std::string numeric_address(const sockaddr* address, socklen_t size);

/// Of a name or a numeric address.
bool is_loopback(const std::string& address);

}  // namespace syncbn::dist::detail
