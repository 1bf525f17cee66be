#include "profile/trace_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string_view>

namespace syncbn::train {
namespace {

/// Quotes and escapes a text.
std::string quoted(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', /*ensure_ascii=*/false,
                                   nlohmann::json::error_handler_t::replace);
}

/// Microseconds with three decimals: a double has too few digits for all times.
std::string microseconds(int64_t nanoseconds) {
  const int64_t size = std::abs(nanoseconds);
  return fmt::format("{}{}.{:03}", nanoseconds < 0 ? "-" : "", size / 1000, size % 1000);
}

/// The position of a track from the top.
int order_of(std::string_view track) {
  constexpr std::string_view kOrder[] = {"steps", "training", "layers", "exchanges", "GPU"};
  const auto* const place =
      std::ranges::find_if(kOrder, [&](std::string_view name) { return track.starts_with(name); });
  return static_cast<int>(place - std::begin(kOrder));
}

}  // namespace

std::string trace_text(int64_t rank, const std::string& host, const std::vector<Track>& tracks,
                       int64_t start) {
  const auto about = [&](const char* event, size_t thread, const std::string& argument) {
    return fmt::format(R"({{"ph":"M","pid":{},"tid":{},"name":"{}","args":{{{}}}}})", rank, thread,
                       event, argument);
  };
  std::string text =
      about("process_name", 0, R"("name":)" + quoted(fmt::format("rank {} ({})", rank, host))) +
      ",\n" + about("process_sort_index", 0, fmt::format(R"("sort_index":{})", rank));
  for (size_t i = 0; i < tracks.size(); ++i) {
    const auto& [name, spans] = tracks[i];
    text += ",\n" + about("thread_name", i + 1, R"("name":)" + quoted(name));
    text += ",\n" +
            about("thread_sort_index", i + 1, fmt::format(R"("sort_index":{})", order_of(name)));
    for (const Track::Span& span : spans) {
      fmt::format_to(std::back_inserter(text),
                     ",\n"
                     R"({{"ph":"X","pid":{},"tid":{},"ts":{},"dur":{},"name":{}}})",
                     rank, i + 1, microseconds(span.time.begin - start),
                     microseconds(span.time.end - span.time.begin), quoted(span.name));
    }
  }
  return text;
}

}  // namespace syncbn::train
