#pragma once

#include <string>

namespace syncbn::base {

/// Equal in all containers of a machine, and another after it has been booted: the kernel's boot
/// id, or the host's name where that cannot be read.
std::string machine_id(const std::string& file = "/proc/sys/kernel/random/boot_id");

}  // namespace syncbn::base
