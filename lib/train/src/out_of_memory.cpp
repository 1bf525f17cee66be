#include "out_of_memory.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <syncbn/base/error.h>

#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

namespace syncbn::train {
namespace {

/// "", or as much as is known: " for 4096 bytes". Nothing when memory is not short.
std::optional<std::string> missing_memory(MemoryFor purpose, const std::exception& error) {
  if (const auto* of_torch = dynamic_cast<const c10::Error*>(&error)) {
    // The CPU's allocator has no type of error of its own.
    const std::string text = of_torch->what_without_backtrace();
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
  // Of a size that no vector can have.
  const bool too_long =
      purpose == MemoryFor::kMaking && dynamic_cast<const std::length_error*>(&error) != nullptr;
  if (too_long || dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return "";
  return std::nullopt;
}

}  // namespace

void throw_if_out_of_memory(MemoryFor purpose, const std::exception& error) {
  const auto missing = missing_memory(purpose, error);
  if (!missing) return;
  if (purpose == MemoryFor::kLater) {
    throw base::UnavailableError(
        fmt::format("there is not enough memory{} now; look for what else takes it on this "
                    "host, or go on with a smaller batch size",
                    *missing));
  }
  throw base::UserError(
      fmt::format("there is not enough memory{}; choose a smaller batch size, smaller images or a "
                  "smaller model, or start fewer ranks on this host",
                  *missing));
}

}  // namespace syncbn::train
