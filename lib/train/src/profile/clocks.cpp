#include "profile/clocks.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <syncbn/dist/collectives.h>
#include <syncbn/dist/process_group.h>

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

namespace syncbn::train {
namespace {

constexpr int kReadings = 32;  // per host; each is a message and its answer

ClockOffset ask(int rank, const std::function<int64_t()>& now) {
  at::Tensor time = at::empty({1}, at::kLong);
  std::vector<ClockReading> readings;
  for (int i = 0; i < kReadings; ++i) {
    ClockReading reading{.sent = now()};
    dist::send(time, rank);
    dist::recv(time, rank);
    reading.received = now();
    reading.other = time.item<int64_t>();
    readings.push_back(reading);
  }
  return offset_of(readings);
}

void answer(const std::function<int64_t()>& now) {
  at::Tensor time = at::empty({1}, at::kLong);
  for (int i = 0; i < kReadings; ++i) {
    dist::recv(time, 0);
    time.fill_(now());
    dist::send(time, 0);
  }
}

}  // namespace

ClockOffset offset_of(const std::vector<ClockReading>& readings) {
  int64_t lowest = std::numeric_limits<int64_t>::min();
  int64_t highest = std::numeric_limits<int64_t>::max();
  for (const auto& [sent, other, received] : readings) {
    lowest = std::max(lowest, other - received);
    highest = std::min(highest, other - sent);
  }
  return {.offset = lowest + (highest - lowest) / 2, .error = (highest - lowest + 1) / 2};
}

std::vector<ClockOffset> clock_offsets(const std::string& host,
                                       const std::function<int64_t()>& now) {
  const std::vector<std::string> hosts = dist::all_gather_bytes(host);
  std::map<std::string, ClockOffset> of_hosts{{hosts[0], {}}};
  for (size_t rank = 0; rank < hosts.size(); ++rank) {
    const auto [offset, is_new] = of_hosts.try_emplace(hosts[rank]);
    if (!is_new) continue;
    const int asked = static_cast<int>(rank);
    if (dist::rank() == 0) offset->second = ask(asked, now);
    if (dist::rank() == asked) answer(now);
  }
  at::Tensor all = at::empty({static_cast<int64_t>(hosts.size()), 2}, at::kLong);
  auto* const numbers = all.mutable_data_ptr<int64_t>();
  for (size_t rank = 0; rank < hosts.size(); ++rank) {
    const auto& [offset, error] = of_hosts[hosts[rank]];
    numbers[2 * rank] = offset;
    numbers[2 * rank + 1] = error;
  }
  dist::broadcast(all, 0);
  std::vector<ClockOffset> offsets;
  for (size_t rank = 0; rank < hosts.size(); ++rank) {
    offsets.push_back({.offset = numbers[2 * rank], .error = numbers[2 * rank + 1]});
  }
  return offsets;
}

}  // namespace syncbn::train
