#pragma once

#include <cstdint>
#include <filesystem>

namespace syncbn::launch {

/// Tells whether the kernel's out-of-memory killer struck in our own control group, which is that
/// of the workers, since this object was made: version 2's memory.events, or version 1's
/// memory.oom_control. Where neither can be read, the killer may have struck anywhere on this
/// machine (/proc/vmstat).
class OomWatch {
 public:
  OomWatch();
  /// Whether a process with that wait status was killed for memory.
  bool killed(int wait_status) const;

 private:
  uint64_t kills() const;

  std::filesystem::path file_;
  uint64_t before_ = 0;
};

}  // namespace syncbn::launch
