#pragma once

#include <cstdint>
#include <string>

namespace syncbn::base {

/// 64 bits from the system's source of randomness.
uint64_t random_bits();

/// random_bits() as sixteen hexadecimal digits: an identifier that nothing else has.
std::string random_id();

}  // namespace syncbn::base
