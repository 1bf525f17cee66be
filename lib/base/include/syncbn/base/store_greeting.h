#pragma once

#include <cstdint>
#include <string>

namespace syncbn::base {

/// The first number that a client of c10d's TCPStore sends (torch's TCPStoreBackend.hpp).
constexpr uint32_t kStoreMagic = 0x3C85F7CE;

/// The first bytes from a client: the magic number, which has no reply, and a ping, to which a
/// store replies with the 4 bytes of the nonce. Integers are in the host's byte order.
std::string store_greeting(uint32_t nonce);

}  // namespace syncbn::base
