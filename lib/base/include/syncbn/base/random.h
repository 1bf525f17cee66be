#pragma once

#include <cstdint>
#include <string>

namespace syncbn::base {

/// 64 bits from getrandom(2), fit for secrets.
/// @throws UnavailableError if the call fails.
uint64_t random_bits();

/// A unique identifier: random_bits() as sixteen hexadecimal digits.
std::string random_id();

}  // namespace syncbn::base
