#pragma once

#include <cstdint>
#include <string>

namespace syncbn::base {

/// The first number that a client of c10d's TCPStore sends (torch's TCPStoreBackend.hpp).
constexpr uint32_t kStoreMagic = 0x3C85F7CE;

/// The first bytes from a client: the magic number, which a store does not answer, and a ping,
/// which it answers with the 4 bytes of the nonce. Integers are in the host's byte order.
inline std::string store_greeting(uint32_t nonce) {
  constexpr char kValidate = 0;
  constexpr char kPing = 13;
  std::string bytes;
  const auto add = [&bytes](char query, uint32_t number) {
    bytes += query;
    bytes.append(reinterpret_cast<const char*>(&number), sizeof(number));
  };
  add(kValidate, kStoreMagic);
  add(kPing, nonce);
  return bytes;
}

}  // namespace syncbn::base
