#pragma once

#include <cstdint>
#include <string_view>

namespace syncbn::base {

/// FNV-1a, 64 bits (Fowler, Noll and Vo): a fingerprint that is the same on every machine. Not
/// cryptographic.
class Fnv1a {
 public:
  void add_byte(uint8_t byte) { hash_ = (hash_ ^ byte) * 0x100000001b3ULL; }
  void add_bytes(std::string_view bytes) {
    for (const char byte : bytes) add_byte(static_cast<uint8_t>(byte));
  }
  /// Adds the bytes in little-endian order on every machine.
  void add(uint64_t word) {
    for (int shift = 0; shift < 64; shift += 8) add_byte(static_cast<uint8_t>(word >> shift));
  }
  uint64_t value() const { return hash_; }

 private:
  uint64_t hash_ = 0xcbf29ce484222325ULL;
};

}  // namespace syncbn::base
