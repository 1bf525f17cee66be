#include <syncbn/base/error.h>

#include <cerrno>
#include <cstring>

namespace syncbn::base {

void throw_errno(const std::string& what) {
  const int error = errno;
  throw UnavailableError(what + ": " + std::strerror(error));
}

}  // namespace syncbn::base
