#include "machine/cpus.h"

#include <fmt/format.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <climits>

#include "common/words.h"

namespace syncbn::launch {

Cpus parse_cpus(std::string_view list) {
  Cpus cpus;
  if (list.ends_with('\n')) list.remove_suffix(1);
  for (const std::string& range : words_of(list)) {
    const size_t dash = std::min(range.find('-'), range.size());
    const auto first = base::parse_number<int>(range.substr(0, dash));
    if (!first) continue;
    const auto last = base::parse_number<int>(range.substr(std::min(dash + 1, range.size())));
    for (int cpu = *first; cpu <= last.value_or(*first); ++cpu) cpus.insert(cpu);
  }
  return cpus;
}

std::string format_cpus(const Cpus& cpus) {
  std::vector<std::string> ranges;
  for (auto cpu = cpus.begin(); cpu != cpus.end();) {
    const int first = *cpu;
    int last = first;
    while (++cpu != cpus.end() && *cpu == last + 1) ++last;
    ranges.push_back(first == last ? std::to_string(first) : fmt::format("{}-{}", first, last));
  }
  return base::join(ranges, ",");
}

std::vector<unsigned long> cpu_mask(const Cpus& cpus) {
  constexpr int kBits = sizeof(unsigned long) * CHAR_BIT;
  const int words = cpus.empty() ? 0 : *cpus.rbegin() / kBits + 1;
  std::vector<unsigned long> mask(static_cast<size_t>(words));
  for (const int cpu : cpus) mask[static_cast<size_t>(cpu / kBits)] |= 1UL << (cpu % kBits);
  return mask;
}

}  // namespace syncbn::launch
