#include <syncbn/base/random.h>

#include <fmt/format.h>

#include <random>

namespace syncbn::base {

uint64_t random_bits() {
  std::random_device random;
  return uint64_t{random()} << 32 | random();
}

std::string random_id() {
  return fmt::format("{:016x}", random_bits());
}

}  // namespace syncbn::base
