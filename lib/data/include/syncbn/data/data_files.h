#pragma once

#include <filesystem>
#include <string>

namespace syncbn::data {

/// Finds a data file that ships with this project, such as "digits.csv.gz". Looked for, in this
/// order, in $SYNCBN_DATA_DIR; in ../share/syncbn/data beside the running program's folder, which
/// is where it lies both in a build tree and in an installation; in ./data.
/// @throws base::UserError naming every place where it was not.
std::filesystem::path find_data_file(const std::string& name);

}  // namespace syncbn::data
