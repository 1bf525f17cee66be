#include <syncbn/base/message_seal.h>

#include <fmt/format.h>
#include <syncbn/base/sha256.h>

#include <cerrno>
#include <utility>

namespace syncbn::base {
namespace {

constexpr size_t kProofDigits = 64;  // of the HMAC; a space follows

std::string proof(const std::string& key, uint64_t number, std::string_view text) {
  return to_hex(hmac_sha256(key, fmt::format("{} {}", number, text)));
}

}  // namespace

MessageSeal::MessageSeal(std::string own_key, std::string others_key)
    : own_key_(std::move(own_key)), others_key_(std::move(others_key)) {}

void MessageSeal::send(Channel& channel, std::string_view line) {
  channel.send(seal(line) + "\n");
}

std::optional<std::string> MessageSeal::next_line(Channel& channel, size_t max_size) {
  const auto line = channel.next_line(max_size);
  if (!line) return std::nullopt;
  auto text = open(*line);
  if (!text) channel.fail(EBADMSG);
  return text;
}

std::string MessageSeal::seal(std::string_view text) {
  return fmt::format("{} {}", proof(own_key_, sent_++, text), text);
}

std::optional<std::string> MessageSeal::open(std::string_view line) {
  if (line.size() <= kProofDigits || line[kProofDigits] != ' ') return std::nullopt;
  const std::string_view text = line.substr(kProofDigits + 1);
  const std::string expected = proof(others_key_, received_, text);
  if (!equal_in_constant_time(line.substr(0, kProofDigits), expected)) return std::nullopt;
  ++received_;
  return std::string(text);
}

}  // namespace syncbn::base
