#include "machine/cpus.h"

#include <fmt/format.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <charconv>
#include <climits>
#include <optional>

namespace syncbn::launch {
namespace {

constexpr int kBits = sizeof(unsigned long) * CHAR_BIT;

std::optional<int> take_number(std::string_view& text) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || number < 0) return std::nullopt;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return number;
}

}  // namespace

Cpus parse_cpus(std::string_view list) {
  Cpus cpus;
  while (!list.empty()) {
    const size_t comma = std::min(list.find(','), list.size());
    std::string_view range = list.substr(0, comma);
    list.remove_prefix(std::min(comma + 1, list.size()));
    const auto first = take_number(range);
    if (!first) continue;
    if (range.starts_with('-')) range.remove_prefix(1);
    const int last = take_number(range).value_or(*first);
    for (int cpu = *first; cpu <= last; ++cpu) cpus.insert(cpu);
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
  const int words = cpus.empty() ? 0 : *cpus.rbegin() / kBits + 1;
  std::vector<unsigned long> mask(static_cast<size_t>(words));
  for (const int cpu : cpus) mask[static_cast<size_t>(cpu / kBits)] |= 1UL << (cpu % kBits);
  return mask;
}

}  // namespace syncbn::launch
