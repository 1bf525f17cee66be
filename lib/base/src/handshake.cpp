#include <fmt/format.h>
#include <syncbn/base/handshake.h>
#include <syncbn/base/random.h>
#include <syncbn/base/sha256.h>
#include <syncbn/base/text.h>

#include <optional>
#include <utility>

namespace syncbn::base {
namespace {

constexpr std::string_view kWithSecret = " token ";
constexpr std::string_view kChallenge = "challenge ";
constexpr std::string_view kProof = "proof ";
constexpr std::string_view kRefused = "refused ";

// The rest of a line that begins with `name`; empty if it does not.
std::string_view after(std::string_view name, std::string_view line) {
  return line.starts_with(name) ? line.substr(name.size()) : std::string_view();
}

bool is_nonce(std::string_view text) {
  return text.size() == 64 && text.find_first_not_of("0123456789abcdef") == text.npos;
}

std::string quoted(std::string_view line) {
  return printable(utf8_prefix(line, 200));
}

// "NAME ", which all versions begin with.
std::string_view any_version(const std::string& greeting) {
  return std::string_view(greeting).substr(0, greeting.find(' ') + 1);
}

}  // namespace

Handshake::Handshake(Side side, Parties parties, std::string secret)
    : side_(side), parties_(std::move(parties)), secret_(std::move(secret)) {}

std::string Handshake::begin() {
  done_ = secret_.empty();
  if (done_) return fmt::format("{}\n", parties_.greeting);
  clients_nonce_ = make_secret();
  return fmt::format("{}{}{}\n", parties_.greeting, kWithSecret, clients_nonce_);
}

bool Handshake::may_begin_with(std::string_view bytes) const {
  const bool is_greeting = side_ == Side::kServer && clients_nonce_.empty();
  const std::string_view start = any_version(parties_.greeting);
  return !is_greeting || start.starts_with(bytes.substr(0, start.size()));
}

std::string Handshake::take(std::string_view line) {
  if (side_ == Side::kServer && clients_nonce_.empty()) return take_greeting(line);
  if (side_ == Side::kClient && servers_nonce_.empty()) {
    servers_nonce_ = after(kChallenge, line);
    if (is_nonce(servers_nonce_)) return fmt::format("{}{}\n", kProof, proof(side_));
    if (line.starts_with(kRefused)) return fail(quoted(after(kRefused, line)));
    return fail(
        fmt::format("it does not ask for the {}, but sends '{}'", parties_.secret, quoted(line)));
  }
  if (!equal_in_constant_time(after(kProof, line), proof(other()))) {
    if (line.starts_with(kRefused)) return fail(quoted(after(kRefused, line)));
    return fail(
        fmt::format("its {} ({}) is another than this job's", parties_.secret, parties_.source));
  }
  done_ = true;
  return side_ == Side::kServer ? fmt::format("{}{}\n", kProof, proof(side_)) : "";
}

bool Handshake::advance(Channel& channel) {
  while (!done_ && failure_.empty()) {
    const std::string_view input = channel.input();
    const auto line =
        may_begin_with(input)
            ? channel.next_line(kMaxLine)
            : std::optional<std::string>(input.substr(0, input.find_first_of("\r\n")));
    if (!line) break;
    channel.send(take(*line));
  }
  return done_;
}

std::string Handshake::take_greeting(std::string_view line) {
  if (!line.starts_with(any_version(parties_.greeting))) {
    return fail(fmt::format("it is no {}, but sends '{}'", parties_.client, quoted(line)));
  }
  const std::string_view rest = after(parties_.greeting, line);
  const bool has_secret = rest.starts_with(kWithSecret);
  if (!line.starts_with(parties_.greeting) || !(rest.empty() || has_secret)) {
    return fail(fmt::format("the {}s of this job are of different versions", parties_.client));
  }
  clients_nonce_ = after(kWithSecret, rest);
  if (has_secret && secret_.empty()) {
    return fail(fmt::format("it has a {} ({}), and {} has none", parties_.secret, parties_.source,
                            parties_.server));
  }
  if (!has_secret && !secret_.empty()) {
    return fail(
        fmt::format("it has no {}, and this job needs one ({})", parties_.secret, parties_.source));
  }
  done_ = secret_.empty();
  if (done_) return "";
  if (!is_nonce(clients_nonce_)) return fail("its nonce is not 64 hexadecimal digits");
  servers_nonce_ = make_secret();
  return fmt::format("{}{}\n", kChallenge, servers_nonce_);
}

std::string Handshake::fail(const std::string& why) {
  failure_ = why;
  return side_ == Side::kServer && !clients_nonce_.empty() ? fmt::format("{}{}\n", kRefused, why)
                                                           : "";
}

std::unique_ptr<MessageSeal> Handshake::protection() const {
  if (secret_.empty()) return nullptr;
  return std::make_unique<MessageSeal>(mac(side_, "messages"), mac(other(), "messages"));
}

std::string Handshake::proof(Side side) const {
  return to_hex(mac(side, "proof"));
}

std::string Handshake::mac(Side side, std::string_view purpose) const {
  return hmac_sha256(secret_, fmt::format("{} {} {} {} {}", parties_.greeting, purpose,
                                          side == Side::kClient ? "client" : "server",
                                          clients_nonce_, servers_nonce_));
}

std::string make_secret() {
  return random_id() + random_id() + random_id() + random_id();
}

}  // namespace syncbn::base
