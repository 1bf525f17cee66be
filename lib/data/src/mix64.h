#pragma once

#include <cstdint>

namespace syncbn::data {

/// The hash function of SplitMix64 (Steele, Lea and Flood, 2014).
inline uint64_t mix64(uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

}  // namespace syncbn::data
