#pragma once

#include <cstdint>
#include <string>

namespace syncbn::base {

/// What a connection to c10d's TCPStore begins with (torch's TCPStoreBackend.hpp).
constexpr uint32_t kStoreMagic = 0x3C85F7CE;

/// The magic number, which has no answer, and a ping: a store sends the nonce's 4 bytes back.
/// Integers are in the host's byte order.
std::string store_greeting(uint32_t nonce);

}  // namespace syncbn::base
