#include <syncbn/base/random.h>

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <sys/random.h>

namespace syncbn::base {

uint64_t random_bits() {
  uint64_t bits = 0;
  if (::getrandom(&bits, sizeof(bits), 0) != sizeof(bits)) throw_errno("cannot get random bits");
  return bits;
}

std::string random_id() {
  return fmt::format("{:016x}", random_bits());
}

}  // namespace syncbn::base
