#include <fcntl.h>
#include <syncbn/base/job_secret.h>
#include <syncbn/base/text.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <string_view>
#include <utility>

namespace syncbn::base {
namespace {

constexpr std::string_view kPrefix = "syncbn-secret ";
constexpr size_t kDigits = 64;
constexpr int kSeals = F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL;

std::string read_secret() {
  const char* const variable = std::getenv(kSecretDescriptor);
  if (variable == nullptr) return "";
  const auto fd = parse_number<int>(variable);
  ::unsetenv(kSecretDescriptor);
  // The number may be stale and refer to another file, which must stay open.
  const int seals = fd ? ::fcntl(*fd, F_GET_SEALS) : -1;
  if (seals < 0 || (seals & kSeals) != kSeals) return "";
  std::string text(kPrefix.size() + kDigits, '\0');
  const ssize_t got = ::pread(*fd, text.data(), text.size(), 0);
  if (got != static_cast<ssize_t>(text.size()) || !text.starts_with(kPrefix)) return "";
  ::close(*fd);
  return text.substr(kPrefix.size());
}

}  // namespace

UniqueFd share_secret(const std::string& secret) {
  UniqueFd fd(::memfd_create("syncbn-secret", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const std::string text = std::string(kPrefix) + secret;
  const bool is_written =
      fd && ::write(fd.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size()) &&
      ::fcntl(fd.get(), F_ADD_SEALS, kSeals) == 0;
  return is_written ? std::move(fd) : UniqueFd();
}

const std::string& job_secret() {
  static const auto* const secret = new std::string(read_secret());  // outlives static destructors
  return *secret;
}

}  // namespace syncbn::base
