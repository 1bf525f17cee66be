#pragma once

#include <filesystem>
#include <string>

namespace syncbn::data {

/// Finds a data file that ships with this project, such as "digits.csv.gz". Searches
/// $SYNCBN_DATA_DIR, then share/syncbn/data beside the running program's bin/ (as in a build tree
/// and in an installation), then ./data.
/// @throws base::UserError naming the searched folders.
std::filesystem::path find_data_file(const std::string& name);

}  // namespace syncbn::data
