#pragma once

#include <syncbn/base/unique_fd.h>

#include <filesystem>

namespace syncbn::base {

/// Opens a file to read, whatever it is. Does not wait for the writer of a FIFO; reads do.
/// @param more_flags of open(), such as O_NOFOLLOW
/// @return empty, with errno, if the file cannot be opened.
UniqueFd open_to_read(const std::filesystem::path& path, int more_flags = 0);

/// Opens a regular file to read.
/// @throws UserError or UnavailableError (see throw_file_error) naming the file.
UniqueFd open_regular_file(const std::filesystem::path& path);

/// Whether there is nothing at `path`. False if something else keeps one from looking, such as a
/// loop of symbolic links: opening the file then says what.
bool is_missing(const std::filesystem::path& path);

}  // namespace syncbn::base
