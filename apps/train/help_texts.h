#pragma once

#include <string_view>

namespace syncbn::train {

/// The output of `train --print_help_texts` at build time: for each way to ask for help the
/// character 0x1e, the arguments, a line break and the text.
extern const std::string_view kHelpTexts;

}  // namespace syncbn::train
