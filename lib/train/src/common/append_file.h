#pragma once

#include <syncbn/base/unique_fd.h>

#include <filesystem>
#include <string_view>

namespace syncbn::train {

/// Opens a regular file to add to its end; creates it if it is missing.
/// @throws as base::throw_file_error(), naming the file, and base::UserError for a pipe or a device
base::UniqueFd open_to_append(const std::filesystem::path& file);

/// Adds bytes to the end of such a file.
/// @throws as base::throw_file_error(), naming the file; a part of the bytes may have been written
void append_to_file(const std::filesystem::path& file, std::string_view bytes);

/// Writes bytes to a descriptor in a single write: readers see all of them, unless the disk is
/// full.
/// @throws as base::throw_file_error(), naming `file`
void write_at_once(int descriptor, const std::filesystem::path& file, std::string_view bytes);

}  // namespace syncbn::train
