#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <syncbn/config/schema.h>
#include <syncbn/data/transforms.h>

namespace syncbn::data::detail {

constexpr int64_t kLongestSide = 65'500;  // pixels; JPEG's

/// Keys of an option struct with the members size, height and width: one side of a square, or both.
template <class Options>
void describe_size(config::Schema<Options>& schema, const std::string& size_help) {
  schema.field("size", &Options::size, size_help).at_least(1).at_most(kLongestSide).unit("px");
  schema.field("height", &Options::height, "together with width, instead of size")
      .at_least(1)
      .at_most(kLongestSide)
      .unit("px");
  schema.field("width", &Options::width, "together with height, instead of size")
      .at_least(1)
      .at_most(kLongestSide)
      .unit("px");
  schema.check([](const Options& options) -> std::optional<std::string> {
    const bool both = options.height && options.width;
    const bool any = options.height || options.width;
    if (both != any || options.size.has_value() == both) {
      return "needs either size, or height and width";
    }
    return std::nullopt;
  });
}

template <class Options>
ImageSize target_size(const Options& options) {
  return {options.size ? *options.size : *options.width,
          options.size ? *options.size : *options.height};
}

}  // namespace syncbn::data::detail
