#pragma once

#include <cstdint>
#include <string>

namespace syncbn::base {

/// 64 bits from std::random_device.
uint64_t random_bits();

/// A unique identifier: random_bits() as sixteen hexadecimal digits.
std::string random_id();

}  // namespace syncbn::base
