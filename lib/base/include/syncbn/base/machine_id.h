#pragma once

#include <string>

namespace syncbn::base {

/// An identifier that is the same in all containers of a machine and changes at each boot: the
/// kernel's boot id, or the host name if that cannot be read.
std::string machine_id(const std::string& file = "/proc/sys/kernel/random/boot_id");

}  // namespace syncbn::base
