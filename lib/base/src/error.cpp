#include <syncbn/base/error.h>

#include <cerrno>
#include <cstring>
#include <new>
#include <system_error>

namespace syncbn::base {

int exit_code_of(const std::exception& error) {
  if (const auto* known = dynamic_cast<const Error*>(&error)) return known->exit_code();
  const bool denied = dynamic_cast<const std::system_error*>(&error) != nullptr ||
                      dynamic_cast<const std::bad_alloc*>(&error) != nullptr;
  return denied ? kExitUnavailable : kExitInternal;
}

void throw_errno(const std::string& what) {
  const int error = errno;
  throw UnavailableError(what + ": " + std::strerror(error));
}

}  // namespace syncbn::base
