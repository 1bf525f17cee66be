#pragma once

#include <cstdlib>

/// What libFuzzer reports as a crash, in builds without assertions too.
inline void require(bool holds) {
  if (!holds) std::abort();
}
