#pragma once

#include <cstdint>
#include <filesystem>

namespace syncbn::launch {

/// Tells whether the kernel's out-of-memory killer has killed processes since this object was made,
/// from counters of our control group, which is also the workers': memory.events (version 2) or
/// memory.oom_control (version 1). If neither can be read, the counter is the whole machine's
/// (/proc/vmstat).
class OomWatch {
 public:
  OomWatch();
  /// Whether a process with this wait status was probably killed for lack of memory.
  bool killed(int wait_status) const;

 private:
  uint64_t kills() const;

  std::filesystem::path file_;
  uint64_t before_ = 0;
};

}  // namespace syncbn::launch
