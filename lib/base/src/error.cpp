#include <syncbn/base/error.h>

#include <fmt/format.h>
#include <net/if.h>
#include <syncbn/base/unique_fd.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <new>
#include <system_error>

namespace syncbn::base {
namespace {

std::string soft_limit(int resource) {
  rlimit limit{};
  ::getrlimit(static_cast<__rlimit_resource>(resource), &limit);
  return limit.rlim_cur == RLIM_INFINITY ? "unlimited" : std::to_string(limit.rlim_cur);
}

std::string max_open_files() {
  std::string number = "?";
  std::ifstream("/proc/sys/fs/file-max") >> number;
  return number;
}

bool is_loopback_down() {
  ifreq request{};
  std::strcpy(request.ifr_name, "lo");
  const UniqueFd any(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  return any && ::ioctl(any.get(), SIOCGIFFLAGS, &request) == 0 &&
         (request.ifr_flags & IFF_UP) == 0;
}

}  // namespace

int exit_code_of(const std::exception& error) {
  if (const auto* known = dynamic_cast<const Error*>(&error)) return known->exit_code();
  const bool denied = dynamic_cast<const std::system_error*>(&error) != nullptr ||
                      dynamic_cast<const std::bad_alloc*>(&error) != nullptr;
  return denied ? kExitUnavailable : kExitInternal;
}

std::string limit_advice(int error) {
  switch (error) {
    case EMFILE:
      return fmt::format("; this process may have {} (ulimit -n): raise the limit",
                         soft_limit(RLIMIT_NOFILE));
    case ENFILE:
      return fmt::format(
          "; all processes together may have {} (sysctl fs.file-max): raise the limit",
          max_open_files());
    case EAGAIN:
      return fmt::format(
          "; this user may have {} processes and threads (ulimit -u), a container perhaps fewer "
          "(pids.max): raise the limit, or start fewer",
          soft_limit(RLIMIT_NPROC));
    case ENOMEM:
      return fmt::format(
          "; this process may have {} bytes of addresses (ulimit -v), a container perhaps less "
          "memory: raise the limit, or end other programs",
          soft_limit(RLIMIT_AS));
    case ENETUNREACH:
      return is_loopback_down() ? "; the loopback interface, lo, is down: ip link set lo up" : "";
    default:
      return "";
  }
}

std::string describe_errno(int error) {
  return std::strerror(error) + limit_advice(error);
}

void throw_errno(const std::string& what) {
  const int error = errno;
  throw UnavailableError(what + ": " + describe_errno(error));
}

}  // namespace syncbn::base
