#include "common/out_of_memory.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/plain_message.h>

#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

namespace syncbn::train {
namespace {

/// " for 4096 bytes", or "" if the size is unknown. Nothing for other errors.
std::optional<std::string> missing_memory(MemoryUse use, const std::exception& error) {
  if (dynamic_cast<const c10::Error*>(&error) != nullptr) {
    // The CPU's allocator throws a plain c10::Error.
    const std::string text = dist::plain_message(error);
    const bool on_cpu = text.find("DefaultCPUAllocator") != std::string::npos;
    if (!on_cpu && dynamic_cast<const c10::OutOfMemoryError*>(&error) == nullptr) {
      return std::nullopt;
    }
    // "... tried to allocate 4096 bytes. ..." or "... Tried to allocate 2.00 GiB. ..."
    constexpr std::string_view kBefore = "ried to allocate ";
    const size_t before = text.find(kBefore);
    if (before == std::string::npos) return "";
    const size_t begin = before + kBefore.size();
    return " for " + text.substr(begin, text.find(". ", begin) - begin);
  }
  // std::length_error: a size that no vector can have.
  const bool too_long =
      use == MemoryUse::kSetup && dynamic_cast<const std::length_error*>(&error) != nullptr;
  if (too_long || dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return "";
  return std::nullopt;
}

}  // namespace

bool is_out_of_memory(const std::exception& error) {
  return missing_memory(MemoryUse::kLater, error).has_value();
}

void throw_if_out_of_memory(MemoryUse use, const std::exception& error) {
  const auto missing = missing_memory(use, error);
  if (!missing) return;
  if (use == MemoryUse::kLater) {
    throw base::UnavailableError(
        fmt::format("there is not enough memory{} now; stop other programs that take it on this "
                    "host, or resume with a smaller batch size",
                    *missing));
  }
  throw base::UserError(
      fmt::format("there is not enough memory{}; choose a smaller batch size, smaller images or a "
                  "smaller model, or start fewer ranks on this host",
                  *missing));
}

}  // namespace syncbn::train
