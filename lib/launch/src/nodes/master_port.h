#pragma once

#include <syncbn/base/held_port.h>
#include <syncbn/base/unique_fd.h>

#include <string>

namespace syncbn::launch {

/// Holds the port of rank 0. @param port 0: a free one.
/// @throws base::UnavailableError if another process listens on it.
base::HeldPort hold_port(int port);

/// Throws base::UnavailableError with errno and advice.
[[noreturn]] void throw_port_error(int port);

/// A socket that listens on the port; empty, with errno set, if that fails.
base::UniqueFd listen_on(int port);

/// Whether `host` is an address of this machine. False when it cannot be resolved.
bool is_local_address(const std::string& host);

}  // namespace syncbn::launch
