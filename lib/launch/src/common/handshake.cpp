#include "common/handshake.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/open_file.h>
#include <syncbn/base/sha256.h>
#include <syncbn/base/unique_fd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace syncbn::launch {
namespace {

constexpr size_t kMinToken = 16;
constexpr size_t kMaxToken = 4096;

std::string read_file(const std::string& path) {
  const auto refuse = [&path](const std::string& why) {
    throw base::UserError(fmt::format("--token_file={}: {}", path, why));
  };
  const base::UniqueFd file = base::open_to_read(path);
  struct stat about {};
  if (!file || ::fstat(file.get(), &about) != 0) refuse(std::strerror(errno));
  if (!S_ISREG(about.st_mode) && !S_ISFIFO(about.st_mode)) refuse("it is no file");
  if ((about.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
    refuse(fmt::format("others can read it (mode {:03o}); chmod 600 makes it private",
                       about.st_mode & 0777U));
  }
  std::string text;
  std::array<char, kMaxToken> buffer;
  while (text.size() <= kMaxToken) {
    const ssize_t got = ::read(file.get(), buffer.data(), buffer.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) refuse(std::strerror(errno));
    if (got == 0) break;
    text.append(buffer.data(), static_cast<size_t>(got));
  }
  return text;
}

}  // namespace

Handshake::Handshake(Side side, std::string token)
    : base::Handshake(side,
                      {.greeting = "syncbn-agent 6",
                       .client = "launcher",
                       .server = "node 0",
                       .secret = "token",
                       .source = "--token_file, SYNCBN_TOKEN"},
                      std::move(token)) {}

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
        source, kMinToken, kMaxToken,
        token.size() > kMaxToken ? "more" : std::to_string(token.size())));
  }
  base::load_sha256();
  return token;
}

}  // namespace syncbn::launch
