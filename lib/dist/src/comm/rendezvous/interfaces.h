#pragma once

#include <sys/socket.h>

#include <string>
#include <vector>

namespace syncbn::dist::detail {

/// The addresses of the interfaces that the user chose by `option`, or else by GLOO_SOCKET_IFNAME,
/// a list with commas. Empty if none was chosen.
/// @throws base::UserError, which lists this host's interfaces.
std::vector<std::string> chosen_addresses(const std::string& option);

/// Sets what NCCL and libtorch read from the environment, unless the user has set it. Called before
/// threads start, which may read the environment at any time.
/// @param interface of InitOptions; may be empty
void set_nccl_environment(const std::string& interface);

/// This host's address on the default route, or else of an interface that is up and not loopback;
/// for a host whose own name resolves to loopback. Empty if there is none.
std::string outside_address();

std::string numeric_address(const sockaddr* address, socklen_t size);

/// @param address numeric, or a name.
bool is_loopback(const std::string& address);

}  // namespace syncbn::dist::detail
