#include "out_of_memory.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <syncbn/base/error.h>

#include <new>
#include <stdexcept>
#include <string>
#include <string_view>

namespace syncbn::train {

void throw_if_out_of_memory(const std::exception& error) {
  std::string amount;
  if (const auto* of_torch = dynamic_cast<const c10::Error*>(&error)) {
    // The CPU's allocator has no type of error of its own.
    const std::string text = of_torch->what_without_backtrace();
    const bool on_cpu = text.find("DefaultCPUAllocator") != std::string::npos;
    if (!on_cpu && dynamic_cast<const c10::OutOfMemoryError*>(&error) == nullptr) return;
    // "... tried to allocate 4096 bytes. ..." or "... Tried to allocate 2.00 GiB. ..."
    constexpr std::string_view kBefore = "ried to allocate ";
    const size_t before = text.find(kBefore);
    if (before != std::string::npos) {
      const size_t begin = before + kBefore.size();
      amount = " for " + text.substr(begin, text.find(". ", begin) - begin);
    }
  } else if (dynamic_cast<const std::bad_alloc*>(&error) == nullptr &&
             dynamic_cast<const std::length_error*>(&error) == nullptr) {
    return;
  }
  throw base::UserError(
      fmt::format("there is not enough memory{}; choose a smaller batch size, smaller images or a "
                  "smaller model, or start fewer ranks on this host",
                  amount));
}

}  // namespace syncbn::train
