#pragma once

#include <syncbn/config/field_info.h>

#include <string>
#include <vector>

namespace syncbn::launch {

/// syncbn-launch(1), for troff's man macros.
std::string man_page(const std::vector<config::FieldInfo>& options);

}  // namespace syncbn::launch
