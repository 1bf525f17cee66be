#pragma once

#include <filesystem>
#include <string_view>

namespace syncbn::train {

/// Adds bytes to the end of a file, which it creates if it is not there.
/// @throws as base::throw_file_error(), naming the file; a part of the bytes may be written then.
void append_to_file(const std::filesystem::path& file, std::string_view bytes);

/// Writes bytes to a descriptor in a single write: readers see all of them, unless the disk is
/// full.
/// @throws as base::throw_file_error(), naming `file`.
void write_at_once(int descriptor, const std::filesystem::path& file, std::string_view bytes);

}  // namespace syncbn::train
