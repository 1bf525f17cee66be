#pragma once

#include <syncbn/base/cpus.h>

#include <string>
#include <string_view>
#include <vector>

namespace syncbn::launch {

using base::allowed_cpus;
using base::Cpus;

/// The kernel's way of writing them, "0-3,8"; what is no number is left out.
Cpus parse_cpus(std::string_view list);
std::string format_cpus(const Cpus& cpus);

/// As sched_setaffinity takes them.
std::vector<unsigned long> cpu_mask(const Cpus& cpus);

}  // namespace syncbn::launch
