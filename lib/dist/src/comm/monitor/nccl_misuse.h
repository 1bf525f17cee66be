#pragma once

#include <exception>
#include <string>

#include <syncbn/dist/plain_message.h>

namespace syncbn::dist::detail {

/// Whether NCCL or ProcessGroupNCCL refused its arguments, so that restarting the program would not
/// help.
inline bool is_misuse_of_nccl(const std::exception& error) {
  const std::string text = plain_message(error);
  for (const char* const sign :
       {"ncclInvalidArgument", "ncclInvalidUsage", "not on device passed to init_process_group"}) {
    if (text.find(sign) != std::string::npos) return true;
  }
  return false;
}

}  // namespace syncbn::dist::detail
