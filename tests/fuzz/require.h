#pragma once

#include <cstdlib>

/// A failure is a crash for libFuzzer, also in builds without assertions.
inline void require(bool holds) {
  if (!holds) std::abort();
}
