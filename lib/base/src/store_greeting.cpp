#include <syncbn/base/store_greeting.h>

namespace syncbn::base {
namespace {

constexpr char kValidate = 0;
constexpr char kPing = 13;

void put_query(std::string& out, char query, uint32_t number) {
  out += query;
  out.append(reinterpret_cast<const char*>(&number), sizeof(number));
}

}  // namespace

std::string store_greeting(uint32_t nonce) {
  std::string bytes;
  put_query(bytes, kValidate, kStoreMagic);
  put_query(bytes, kPing, nonce);
  return bytes;
}

}  // namespace syncbn::base
