#pragma once

#include <exception>
#include <string>

#include <c10/util/Exception.h>

namespace syncbn::dist {

/// The message of an exception, without the stack frames that libtorch adds to its own.
inline std::string plain_message(const std::exception& error) {
  const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
  return of_torch != nullptr ? of_torch->what_without_backtrace() : error.what();
}

}  // namespace syncbn::dist
