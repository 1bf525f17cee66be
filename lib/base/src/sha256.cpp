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

/// OpenSSL's functions, which are loaded on demand: a program that links libcrypto starts
/// milliseconds later. Neither HMAC() nor EVP_Digest(), which crash after OpenSSL's own exit
/// handler: a rank seals its leave notice in a later one.
struct Libcrypto {
  int (*init)(void*);
  int (*update)(void*, const void*, size_t);
  int (*finish)(void*, void*);
  int (*compare)(const void*, const void*, size_t);
};

Libcrypto load() {
  for (const char* const file : {"libcrypto.so.3", "libcrypto.so.1.1"}) {
    void* const library = ::dlopen(file, RTLD_LAZY);
    const auto take = [library]<class Function>(const char* name, Function*& function) {
      function = reinterpret_cast<Function*>(library == nullptr ? nullptr : ::dlsym(library, name));
      return function != nullptr;
    };
    Libcrypto found{};
    if (take("SHA256_Init", found.init) && take("SHA256_Update", found.update) &&
        take("SHA256_Final", found.finish) && take("CRYPTO_memcmp", found.compare)) {
      return found;
    }
  }
  throw UserError(fmt::format(
      "cannot load OpenSSL's libcrypto.so.3 or libcrypto.so.1.1, which computes SHA-256: "
      "{}; install OpenSSL (Debian's package libssl3)",
      ::dlerror()));
}

const Libcrypto& libcrypto() {
  static const Libcrypto functions = load();
  return functions;
}

std::string sha256_of(std::initializer_list<std::string_view> parts) {
  const Libcrypto& openssl = libcrypto();
  std::array<uint64_t, 32> context;  // OpenSSL's SHA256_CTX, which has 112 bytes
  std::string digest(32, '\0');
  bool done = openssl.init(context.data()) == 1;
  for (const std::string_view part : parts)
    done = done && openssl.update(context.data(), part.data(), part.size()) == 1;
  if (!done || openssl.finish(digest.data(), context.data()) != 1)
    throw InternalError("OpenSSL's libcrypto refuses to compute SHA-256");
  return digest;
}

}  // namespace

void load_sha256() {
  libcrypto();
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
  return a.size() == b.size() && libcrypto().compare(a.data(), b.data(), a.size()) == 0;
}

}  // namespace syncbn::base
