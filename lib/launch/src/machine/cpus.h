#pragma once

#include <syncbn/base/cpus.h>

#include <string>
#include <string_view>
#include <vector>

namespace syncbn::launch {

using base::allowed_cpus;
using base::Cpus;

/// Reads the kernel's notation, "0-3,8". Entries that are not numbers are ignored.
Cpus parse_cpus(std::string_view list);
std::string format_cpus(const Cpus& cpus);

/// A mask for sched_setaffinity.
std::vector<unsigned long> cpu_mask(const Cpus& cpus);

}  // namespace syncbn::launch
