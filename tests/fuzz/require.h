#pragma once

#include <cstdlib>

/// A failure is a crash for libFuzzer, also in builds without assertions.
inline void require(bool holds) {
  if (!holds) std::abort();
}

/// Runs `body`, which may also throw `Error`.
template <class Error, class Body>
void may_refuse(const Body& body) {
  try {
    body();
  } catch (const Error&) {
  }
}
