#pragma once

#include <cstddef>
#include <cstdint>

namespace syncbn::data {

/// FNV-1a, 64 bits: a fingerprint that is the same on every machine. Not for adversaries.
class Fnv1a {
 public:
  void add_byte(uint8_t byte) { hash_ = (hash_ ^ byte) * 0x100000001b3ULL; }
  /// Little-endian, whatever the machine.
  void add(uint64_t word) {
    for (int shift = 0; shift < 64; shift += 8) add_byte(static_cast<uint8_t>(word >> shift));
  }
  uint64_t value() const { return hash_; }

 private:
  uint64_t hash_ = 0xcbf29ce484222325ULL;
};

/// The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): well mixed bits of a counter.
inline uint64_t mix64(uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

}  // namespace syncbn::data
