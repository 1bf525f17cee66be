#pragma once

#include <bit>
#include <cstddef>
#include <cstring>
#include <string_view>

namespace syncbn::models::detail {

static_assert(std::endian::native == std::endian::little, "files hold little-endian numbers");

/// The number at `offset`, which must lie within `bytes`.
template <class Number>
Number read_le(std::string_view bytes, size_t offset) {
  Number number{};
  std::memcpy(&number, bytes.data() + offset, sizeof number);
  return number;
}

}  // namespace syncbn::models::detail
