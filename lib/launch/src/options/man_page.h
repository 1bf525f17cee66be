#pragma once

#include <string>
#include <vector>

#include "options/option_help.h"

namespace syncbn::launch {

/// syncbn-launch(1), for troff's man macros.
std::string man_page(const std::vector<OptionFacts>& options);

}  // namespace syncbn::launch
