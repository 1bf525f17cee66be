#include "records/memory_gauge.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <syncbn/base/text.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>

namespace syncbn::train {
namespace {

uint64_t resident_bytes() {
  uint64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages >> pages;  // the second number is the resident set
  return pages * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

uint64_t allocated_bytes(at::Device gpu) {
  constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const auto stats = c10::getDeviceAllocator(gpu.type())->getDeviceStats(gpu.index());
  return static_cast<uint64_t>(stats.allocated_bytes.at(kAll).current);
}

}  // namespace

double peak_resident_bytes() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) * 1024;
}

const std::string& MemoryGauge::text() {
  constexpr auto kPeriod = std::chrono::seconds(1);
  const auto now = std::chrono::steady_clock::now();
  if (text_.empty() || now - read_ >= kPeriod) {
    read_ = now;
    text_ = base::format_bytes(device_.is_cuda() ? allocated_bytes(device_) : resident_bytes());
  }
  return text_;
}

}  // namespace syncbn::train
