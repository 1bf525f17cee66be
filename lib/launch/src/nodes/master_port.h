#pragma once

#include <syncbn/base/held_port.h>
#include <syncbn/base/unique_fd.h>
#include <syncbn/launch/options.h>

#include <string>
#include <vector>

namespace syncbn::launch {

/// Holds the port of rank 0. @param port 0: a free one.
/// @throws base::UnavailableError if another process listens on it.
base::HeldPort hold_port(int port);

/// Throws base::UnavailableError with errno and advice.
[[noreturn]] void throw_port_error(int port);

/// A socket that listens on the port; empty, with errno set, if that fails.
/// @param address of listen_address().
base::UniqueFd listen_on(int port, const std::string& address);

/// The numeric address at which node 0 listens: that of --listen, or a loopback address in
/// --master_addr, also as "localhost"; empty: all addresses. @throws base::UserError if --listen is
/// neither an address nor an interface of this machine.
std::string listen_address(const LaunchOptions& options);

/// The numeric addresses of this machine's network interfaces, loopback excepted.
std::vector<std::string> own_addresses();

/// The name of this machine in messages.
std::string own_name(const LaunchOptions& options);

/// Limits name lookups of this process to 4 s, from 10 s, if the name server does not answer:
/// launchers repeat failed lookups, and report the first failure.
void limit_name_lookups();

/// Whether `host` is an address of this machine. False when it cannot be resolved; then `reason`
/// says why.
bool is_local_address(const std::string& host, std::string& reason);
bool is_local_address(const std::string& host);

}  // namespace syncbn::launch
