#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>

namespace syncbn::base {

/// Replaces `path`, or the file that it leads to as a link, by what `write` puts into the temporary
/// file it is given, or leaves it alone: temporary in the same folder, fsync, rename, fsync of the
/// folder. Creates missing folders. A reader sees the old file or the new one, never a part.
/// @throws UserError or UnavailableError (see throw_file_error) naming the file and the reason; the
///   temporary is removed.
void write_file_atomically(const std::filesystem::path& path,
                           const std::function<void(const std::filesystem::path&)>& write);

/// The same with the bytes at hand. What is no regular file, as /dev/stdout or a FIFO, gets them as
/// they come.
void write_file_atomically(const std::filesystem::path& path, std::string_view bytes);

/// For files that are to be written after long work: throws now what write_file_atomically() would
/// throw then because of the path. It creates missing folders, too. A FIFO needs a reader.
void check_can_write(const std::filesystem::path& path);

/// Throws what the errno `error` of a failed file operation means: UserError where the path is at
/// fault (it leads through a file, is not allowed, is too long), UnavailableError where the disk
/// is.
[[noreturn]] void throw_file_error(const std::string& what, int error);

/// The whole file. @throws UserError naming the file when it cannot be read, or is larger.
std::string read_file(const std::filesystem::path& path, size_t most_bytes = SIZE_MAX);

}  // namespace syncbn::base
