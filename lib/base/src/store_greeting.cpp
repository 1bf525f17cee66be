#include <syncbn/base/store_greeting.h>

namespace syncbn::base {

std::string store_greeting(uint32_t nonce) {
  constexpr char kValidate = 0;
  constexpr char kPing = 13;
  std::string bytes;
  const auto add = [&bytes](char query, uint32_t number) {
    bytes += query;
    bytes.append(reinterpret_cast<const char*>(&number), sizeof(number));
  };
  add(kValidate, kStoreMagic);
  add(kPing, nonce);
  return bytes;
}

}  // namespace syncbn::base
