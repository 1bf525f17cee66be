#pragma once

#include <exception>
#include <string>

#include <c10/util/Exception.h>

namespace syncbn::dist::detail {

/// The message of an exception, without the stack frames that libtorch adds to its own.
inline std::string plain_message(const std::exception& error) {
  const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
  return of_torch != nullptr ? of_torch->what_without_backtrace() : error.what();
}

/// Whether NCCL or ProcessGroupNCCL found fault with what it was given: another start of the
/// program would change nothing.
inline bool is_misuse_of_nccl(const std::exception& error) {
  const std::string text = plain_message(error);
  for (const char* const sign :
       {"ncclInvalidArgument", "ncclInvalidUsage", "not on device passed to init_process_group"}) {
    if (text.find(sign) != std::string::npos) return true;
  }
  return false;
}

}  // namespace syncbn::dist::detail
