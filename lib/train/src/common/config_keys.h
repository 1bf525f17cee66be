#pragma once

#include <string_view>

// Keys of a configuration that comparisons of two configurations ignore.
// is_incidental() and may_differ() are also true for the keys of the functions above them.
namespace syncbn::train {

/// Keys about the run's folder, which differ between all runs.
bool is_of_folder(std::string_view key);

/// Keys about what is shown of a run.
bool is_incidental(std::string_view key);

/// Keys that name files or folders of samples.
bool is_path_of_data(std::string_view key);

/// Keys that may differ between the ranks of a run.
bool may_differ(std::string_view key);

/// Keys that may change when a run is resumed. Not all of may_differ(): files of data may not.
bool may_change(std::string_view key);

}  // namespace syncbn::train
