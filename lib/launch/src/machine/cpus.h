#pragma once

#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace syncbn::launch {

/// Processors by the kernel's numbers: hardware threads, not cores.
using Cpus = std::set<int>;

/// Those that this process may run on.
Cpus allowed_cpus();

/// The kernel's way of writing them, "0-3,8"; what is no number is left out.
Cpus parse_cpus(std::string_view list);
std::string format_cpus(const Cpus& cpus);

/// As sched_setaffinity takes them.
std::vector<unsigned long> cpu_mask(const Cpus& cpus);

}  // namespace syncbn::launch
