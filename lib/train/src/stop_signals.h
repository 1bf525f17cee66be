#pragma once

#include <signal.h>

namespace syncbn::train {

/// While it lives, SIGTERM and SIGINT do not end the process: the training loop asks for them.
/// One object at a time.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  /// The signal that arrived, or 0.
  static int received();

 private:
  struct sigaction former_term_ {};
  struct sigaction former_int_ {};
};

}  // namespace syncbn::train
