#pragma once

#include <string>
#include <vector>

// Comma-separated values (RFC 4180).
namespace syncbn::train {

/// A field, in quotes where the format asks for them.
std::string csv_field(const std::string& text);

/// The rows of a file. A last row without a line end is left out: it is cut off.
std::vector<std::vector<std::string>> csv_rows(const std::string& text);

}  // namespace syncbn::train
