#pragma once

#include <cstdlib>

namespace syncbn::test {

/// Lets a rank that leaves the message to another one end after a second instead of ten: every
/// nanosleep() of 1 s or more takes 1 s. Not for jobs in which the launcher has to end such ranks
/// before they report the same mistake.
inline void shorten_quiet_exits() {
  ::setenv("LD_PRELOAD", SYNCBN_SLOW_STARTS, 1);
  ::setenv("SLOW_STARTS_MOST_SLEEP_MS", "1000", 1);
}

}  // namespace syncbn::test
