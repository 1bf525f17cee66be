#pragma once

#include <cstdint>
#include <filesystem>

namespace syncbn::launch {

/// Tells whether the kernel's out-of-memory killer struck in our own control group, which is that
/// of the workers, since this object was made: version 2's memory.events, or version 1's
/// memory.oom_control. False where neither can be read.
class OomWatch {
 public:
  OomWatch();
  bool struck() const;

 private:
  uint64_t kills() const;

  std::filesystem::path file_;
  uint64_t before_ = 0;
};

}  // namespace syncbn::launch
