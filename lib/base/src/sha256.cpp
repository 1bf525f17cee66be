// Not from OpenSSL: a program takes about 5 ms to load libcrypto, and the launcher has to start
// within a few.
#include <syncbn/base/sha256.h>

#include <fmt/format.h>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace syncbn::base {
namespace {

constexpr size_t kBlock = 64;

// FIPS 180-4, 4.2.2.
constexpr std::array<uint32_t, 64> kRounds{
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

using State = std::array<uint32_t, 8>;

// FIPS 180-4, 5.3.3.
constexpr State kStart{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                       0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

uint32_t big_endian(std::string_view bytes) {
  uint32_t number = 0;
  for (const char byte : bytes.substr(0, 4)) number = number << 8 | static_cast<uint8_t>(byte);
  return number;
}

// FIPS 180-4, 6.2.2.
void add_block(State& state, std::string_view block) {
  std::array<uint32_t, 64> words;
  for (size_t t = 0; t < 16; ++t) words[t] = big_endian(block.substr(4 * t));
  for (size_t t = 16; t < 64; ++t) {
    const uint32_t x = words[t - 15];
    const uint32_t y = words[t - 2];
    words[t] = words[t - 16] + words[t - 7] + (std::rotr(x, 7) ^ std::rotr(x, 18) ^ x >> 3) +
               (std::rotr(y, 17) ^ std::rotr(y, 19) ^ y >> 10);
  }
  auto [a, b, c, d, e, f, g, h] = state;
  for (size_t t = 0; t < 64; ++t) {
    const uint32_t first = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) +
                           ((e & f) ^ (~e & g)) + kRounds[t] + words[t];
    const uint32_t second =
        (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g;
    g = f;
    f = e;
    e = d + first;
    d = c;
    c = b;
    b = a;
    a = first + second;
  }
  const State added{a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < state.size(); ++i) state[i] += added[i];
}

}  // namespace

std::string sha256(std::string_view bytes) {
  State state = kStart;
  const uint64_t bits = uint64_t{8} * bytes.size();
  for (; bytes.size() >= kBlock; bytes.remove_prefix(kBlock)) add_block(state, bytes);
  std::string rest(bytes);
  rest += '\x80';
  rest.resize(rest.size() + (2 * kBlock - 8 - rest.size()) % kBlock);
  for (int shift = 56; shift >= 0; shift -= 8) rest += static_cast<char>(bits >> shift);
  for (size_t at = 0; at < rest.size(); at += kBlock) {
    add_block(state, std::string_view(rest).substr(at));
  }
  std::string digest;
  for (const uint32_t word : state) {
    for (int shift = 24; shift >= 0; shift -= 8) digest += static_cast<char>(word >> shift);
  }
  return digest;
}

std::string hmac_sha256(std::string_view key, std::string_view bytes) {
  std::string inner = key.size() > kBlock ? sha256(key) : std::string(key);
  inner.resize(kBlock);
  std::string outer = inner;
  for (char& byte : inner) byte = static_cast<char>(byte ^ 0x36);
  for (char& byte : outer) byte = static_cast<char>(byte ^ 0x5c);
  return sha256(outer + sha256(inner.append(bytes)));
}

std::string to_hex(std::string_view bytes) {
  std::string text;
  for (const char byte : bytes) text += fmt::format("{:02x}", static_cast<uint8_t>(byte));
  return text;
}

bool equal_in_constant_time(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  int difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= a[i] ^ b[i];
  return difference == 0;
}

}  // namespace syncbn::base
