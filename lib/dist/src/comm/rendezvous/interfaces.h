#pragma once

#include <string>
#include <vector>

namespace syncbn::dist::detail {

/// The addresses of the interfaces that the user chose by `option`, or else by the comma-separated
/// GLOO_SOCKET_IFNAME. Empty if none was chosen.
/// @throws base::UserError for an unknown interface; lists this host's.
std::vector<std::string> chosen_addresses(const std::string& option);

/// Sets environment variables of NCCL and libtorch that the user has not set. Must be called before
/// threads start, which may read the environment at any time.
/// @param interface of InitOptions; may be empty
void set_nccl_environment(const std::string& interface);

/// This host's address on the default route, or else of an interface that is up and neither
/// loopback nor link-local; for hosts whose own name resolves to loopback. Empty if there is none.
std::string outside_address();

}  // namespace syncbn::dist::detail
