#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

namespace syncbn::dist::detail {

/// The pauses between a rank's questions to the store: 1 ms, and then up to 50 ms, because a
/// thousand ranks may ask.
class Polls {
 public:
  void pause() {
    std::this_thread::sleep_for(delay_);
    delay_ = std::min(2 * delay_, std::chrono::milliseconds(50));
  }

 private:
  std::chrono::milliseconds delay_{1};
};

}  // namespace syncbn::dist::detail
