#pragma once

#include <syncbn/base/unique_fd.h>

#include <filesystem>
#include <string>

namespace syncbn::base {

/// Opens a file of any type for reading. Does not wait for the writer of a FIFO: until one opens
/// the FIFO, reads return the end of the file.
/// @param more_flags of open(), such as O_NOFOLLOW
/// @return an invalid descriptor, with errno, if the file cannot be opened.
UniqueFd open_to_read(const std::filesystem::path& path, int more_flags = 0);

/// Opens a regular file for reading.
/// @throws UserError or UnavailableError (see throw_file_error) naming the file, and the target of
///   a link to nothing.
UniqueFd open_regular_file(const std::filesystem::path& path);

/// Whether `path` does not exist. False if that cannot be determined, for example because of a loop
/// of symbolic links: opening the file then reports the reason.
bool is_missing(const std::filesystem::path& path);

/// "it is a link to 'TARGET', which does not exist"; "" for anything else.
std::string dangling_link(const std::filesystem::path& path);

/// For messages: why opening `path` failed with this errno. Names the target of a link to nothing.
std::string open_error(const std::filesystem::path& path, int error);

/// Whether `folder` / `name` is in the folder or below it, for a name that was read from a file and
/// may be anyone's. Does not look at links, which are the folder's owner's.
bool is_within(const std::filesystem::path& folder, const std::filesystem::path& name);

}  // namespace syncbn::base
