#pragma once

#include <string>
#include <string_view>

namespace syncbn::base {

/// Loads OpenSSL's libcrypto, which the first digest loads otherwise. Call it where an error can be
/// reported.
/// @throws UserError if it is not installed.
void load_sha256();

/// SHA-256 (FIPS 180-4): 32 bytes.
std::string sha256(std::string_view bytes);

/// HMAC-SHA256 (RFC 2104): 32 bytes.
std::string hmac_sha256(std::string_view key, std::string_view bytes);

/// Two lower-case hexadecimal digits for each byte.
std::string to_hex(std::string_view bytes);

/// Compares two texts in a time that does not depend on where they differ. Use it for secrets and
/// proofs of them.
bool equal_in_constant_time(std::string_view a, std::string_view b);

}  // namespace syncbn::base
