#pragma once

#include <string>
#include <string_view>

namespace syncbn::base {

/// SHA-256 (FIPS 180-4): 32 bytes.
std::string sha256(std::string_view bytes);

/// HMAC-SHA256 (RFC 2104): 32 bytes.
std::string hmac_sha256(std::string_view key, std::string_view bytes);

/// Two lower-case hexadecimal digits for each byte.
std::string to_hex(std::string_view bytes);

/// Whether two texts are equal, in a time that does not depend on where they differ: for proofs of
/// a secret.
bool equal_in_constant_time(std::string_view a, std::string_view b);

}  // namespace syncbn::base
