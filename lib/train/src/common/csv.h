#pragma once

#include <string>
#include <vector>

// Comma-separated values (RFC 4180).
namespace syncbn::train {

/// A field, quoted if the format requires it.
std::string csv_field(const std::string& text);

/// A row, with its line end.
std::string csv_line(const std::vector<std::string>& row);

/// The rows of a file. Omits a last row without a line end, since it is truncated.
std::vector<std::vector<std::string>> csv_rows(const std::string& text);

}  // namespace syncbn::train
