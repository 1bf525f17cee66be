#include "common/handshake.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/open_file.h>
#include <syncbn/base/random.h>
#include <syncbn/base/sha256.h>
#include <syncbn/base/text.h>
#include <syncbn/base/unique_fd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "common/message_seal.h"
#include "common/tls_link.h"

namespace syncbn::launch {
namespace {

constexpr std::string_view kGreeting = "syncbn-agent 3";
/// Of any version.
constexpr std::string_view kAnyGreeting = kGreeting.substr(0, kGreeting.find(' ') + 1);
constexpr std::string_view kWithToken = " token ";
constexpr std::string_view kWithTls = " tls ";
constexpr std::string_view kChallenge = "challenge ";
constexpr std::string_view kProof = "proof ";
constexpr std::string_view kRefused = "refused ";

constexpr size_t kMinToken = 16;
constexpr size_t kMaxToken = 4096;

// What follows `name` in the line; empty if the line does not begin with it.
std::string_view after(std::string_view name, std::string_view line) {
  return line.starts_with(name) ? line.substr(name.size()) : std::string_view();
}

bool is_nonce(std::string_view text) {
  return text.size() == 64 && text.find_first_not_of("0123456789abcdef") == text.npos;
}

std::string quoted(std::string_view line) {
  return base::printable(base::utf8_prefix(line, 200));
}

std::string read_file(const std::string& path) {
  const base::UniqueFd file = base::open_to_read(path);
  struct stat about {};
  if (!file || ::fstat(file.get(), &about) != 0) {
    throw base::UserError(fmt::format("--token_file={}: {}", path, std::strerror(errno)));
  }
  if (!S_ISREG(about.st_mode) && !S_ISFIFO(about.st_mode)) {
    throw base::UserError(fmt::format("--token_file={}: it is no file", path));
  }
  if ((about.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
    throw base::UserError(
        fmt::format("--token_file={}: others can read it (mode {:03o}); chmod 600 makes it private",
                    path, about.st_mode & 0777U));
  }
  std::string text;
  std::array<char, kMaxToken> buffer;
  while (text.size() <= kMaxToken) {
    const ssize_t got = ::read(file.get(), buffer.data(), buffer.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      throw base::UserError(fmt::format("--token_file={}: {}", path, std::strerror(errno)));
    }
    if (got == 0) break;
    text.append(buffer.data(), static_cast<size_t>(got));
  }
  return text;
}

}  // namespace

Handshake::Handshake(Side side, std::string token, bool tls)
    : side_(side), token_(std::move(token)), tls_(tls) {}

std::string Handshake::begin() {
  done_ = token_.empty();
  if (done_) return fmt::format("{}\n", kGreeting);
  launchers_nonce_ = make_token();
  return fmt::format("{}{}{}\n", kGreeting, tls_ ? kWithTls : kWithToken, launchers_nonce_);
}

bool Handshake::may_begin_with(std::string_view bytes) const {
  const bool is_greeting = side_ == Side::kCoordinator && launchers_nonce_.empty();
  return !is_greeting || kAnyGreeting.starts_with(bytes.substr(0, kAnyGreeting.size()));
}

std::string Handshake::take(std::string_view line) {
  if (side_ == Side::kCoordinator && launchers_nonce_.empty()) return take_greeting(line);
  if (side_ == Side::kLauncher && coordinators_nonce_.empty()) {
    coordinators_nonce_ = after(kChallenge, line);
    if (is_nonce(coordinators_nonce_)) {
      return fmt::format("{}{}\n", kProof, proof(side_));
    }
    if (line.starts_with(kRefused)) return fail(quoted(after(kRefused, line)));
    return fail(fmt::format("it does not ask for the token, but sends '{}'", quoted(line)));
  }
  if (!base::equal_in_constant_time(after(kProof, line), proof(other()))) {
    if (line.starts_with(kRefused)) return fail(quoted(after(kRefused, line)));
    return fail("its token (--token_file, SYNCBN_TOKEN) is another than this job's");
  }
  done_ = true;
  return side_ == Side::kCoordinator ? fmt::format("{}{}\n", kProof, proof(side_)) : "";
}

std::string Handshake::take_greeting(std::string_view line) {
  if (!line.starts_with(kAnyGreeting)) {
    return fail(fmt::format("it is no launcher, but sends '{}'", quoted(line)));
  }
  const std::string_view rest = after(kGreeting, line);
  const bool has_tls = rest.starts_with(kWithTls);
  const bool has_token = has_tls || rest.starts_with(kWithToken);
  if (!line.starts_with(kGreeting) || !(rest.empty() || has_token)) {
    return fail("the launchers of this job are of different versions");
  }
  launchers_nonce_ = after(has_tls ? kWithTls : kWithToken, rest);
  if (has_token && token_.empty()) {
    return fail("it has a token (--token_file, SYNCBN_TOKEN), and node 0 has none");
  }
  if (!has_token && !token_.empty()) {
    return fail("it has no token, and this job needs one (--token_file, SYNCBN_TOKEN)");
  }
  if (has_tls != tls_) {
    return fail(has_tls ? "it was started with --tls, and node 0 without"
                        : "it was started without --tls, and node 0 with it");
  }
  done_ = token_.empty();
  if (done_) return "";
  if (!is_nonce(launchers_nonce_)) return fail("its nonce is not 64 hexadecimal digits");
  coordinators_nonce_ = make_token();
  return fmt::format("{}{}\n", kChallenge, coordinators_nonce_);
}

std::string Handshake::fail(const std::string& why) {
  failure_ = why;
  return side_ == Side::kCoordinator && !launchers_nonce_.empty()
             ? fmt::format("{}{}\n", kRefused, why)
             : "";
}

std::unique_ptr<LinkProtection> Handshake::protection() const {
  if (token_.empty()) return nullptr;
  if (tls_) return make_tls_link(side_ == Side::kLauncher, mac(Side::kLauncher, "tls"));
  return std::make_unique<MessageSeal>(mac(side_, "messages"), mac(other(), "messages"));
}

std::string Handshake::proof(Side side) const {
  return base::to_hex(mac(side, "proof"));
}

std::string Handshake::mac(Side side, std::string_view purpose) const {
  const char* const name = side == Side::kLauncher ? "launcher" : "coordinator";
  return base::hmac_sha256(token_, fmt::format("{} {} {} {} {}", kGreeting, purpose, name,
                                               launchers_nonce_, coordinators_nonce_));
}

std::string make_token() {
  return base::random_id() + base::random_id() + base::random_id() + base::random_id();
}

std::string read_token(const std::string& file) {
  const auto first_line = [](std::string_view text) {
    return std::string(text.substr(0, text.find_first_of("\r\n")));
  };
  const char* const variable = std::getenv("SYNCBN_TOKEN");
  if (variable == nullptr && file.empty()) return "";
  const std::string in_variable = first_line(variable == nullptr ? "" : variable);
  ::unsetenv("SYNCBN_TOKEN");
  std::string token = file.empty() ? in_variable : first_line(read_file(file));
  if (!in_variable.empty() && token != in_variable) {
    throw base::UserError(fmt::format(
        "--token_file={} and the variable SYNCBN_TOKEN hold different tokens; give one of them",
        file));
  }
  const char* const source = file.empty() ? "SYNCBN_TOKEN" : "--token_file";
  if (token.size() < kMinToken || token.size() > kMaxToken) {
    throw base::UserError(fmt::format(
        "{}: a token has {} to {} bytes, and this one has {}; `openssl rand -hex 32` makes one",
        source, kMinToken, kMaxToken, token.size()));
  }
  return token;
}

}  // namespace syncbn::launch
