#pragma once

#include <string>
#include <vector>

namespace syncbn::train {

/// The rows of comma-separated values (RFC 4180). A last row without a line end is left out: it is
/// cut off.
std::vector<std::vector<std::string>> csv_rows(const std::string& text);

}  // namespace syncbn::train
