#include <dlfcn.h>
#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/sha256.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

namespace syncbn::base {
namespace {

/// A function of OpenSSL, which is loaded on demand: a program that links libcrypto starts
/// milliseconds later. Neither HMAC() nor EVP_Digest(), which crash after OpenSSL's own exit
/// handler: a rank seals its leave notice in a later one.
template <class Function>
Function* libcrypto(const char* name) {
  void* library = ::dlopen("libcrypto.so.3", RTLD_LAZY);
  if (library == nullptr) library = ::dlopen("libcrypto.so.1.1", RTLD_LAZY);
  void* const function = library == nullptr ? nullptr : ::dlsym(library, name);
  if (function != nullptr) return reinterpret_cast<Function*>(function);
  throw UserError(fmt::format(
      "cannot load OpenSSL's libcrypto.so.3 or libcrypto.so.1.1, which computes SHA-256: "
      "{}; install OpenSSL (Debian's package libssl3)",
      ::dlerror()));
}

std::string sha256_of(std::initializer_list<std::string_view> parts) {
  static auto* const init = libcrypto<int(void*)>("SHA256_Init");
  static auto* const update = libcrypto<int(void*, const void*, size_t)>("SHA256_Update");
  static auto* const finish = libcrypto<int(void*, void*)>("SHA256_Final");
  std::array<uint64_t, 32> context;  // OpenSSL's SHA256_CTX, which has 112 bytes
  init(context.data());
  for (const std::string_view part : parts) update(context.data(), part.data(), part.size());
  std::string digest(32, '\0');
  finish(digest.data(), context.data());
  return digest;
}

}  // namespace

void load_sha256() {
  sha256("");
}

std::string sha256(std::string_view bytes) {
  return sha256_of({bytes});
}

std::string hmac_sha256(std::string_view key, std::string_view bytes) {
  std::string inner = key.size() > 64 ? sha256(key) : std::string(key);
  inner.resize(64);
  std::string outer = inner;
  for (char& byte : inner) byte = static_cast<char>(byte ^ 0x36);
  for (char& byte : outer) byte = static_cast<char>(byte ^ 0x5c);
  return sha256_of({outer, sha256_of({inner, bytes})});
}

std::string to_hex(std::string_view bytes) {
  std::string text;
  for (const char byte : bytes) text += fmt::format("{:02x}", static_cast<uint8_t>(byte));
  return text;
}

bool equal_in_constant_time(std::string_view a, std::string_view b) {
  static auto* const compare = libcrypto<int(const void*, const void*, size_t)>("CRYPTO_memcmp");
  return a.size() == b.size() && compare(a.data(), b.data(), a.size()) == 0;
}

}  // namespace syncbn::base
