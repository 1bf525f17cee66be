#pragma once

#include <filesystem>
#include <string>

namespace syncbn::data {

/// Finds a data file that ships with this project, such as "digits.csv.gz". Looked for, in this
/// order: $SYNCBN_DATA_DIR; ../share/syncbn/data and ../../data beside the running program's folder
/// (an installed program and one in a build tree); ./data.
/// When SYNCBN_DATA_DIR is set, nothing else is looked at.
/// @throws base::UserError naming every place where it was not.
std::filesystem::path find_data_file(const std::string& name);

}  // namespace syncbn::data
