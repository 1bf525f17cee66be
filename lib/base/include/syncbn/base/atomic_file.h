#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>

namespace syncbn::base {

/// Replaces `path`, or the target of a symbolic link, by a temporary file in the same folder, which
/// `write` fills: fsync, rename, fsync of the folder. Creates missing folders. A reader sees the
/// old file or the new one, never a part.
/// @throws UserError or UnavailableError (see throw_file_error) naming the file and the reason. The
///   temporary file is removed, and the old file is unchanged unless only the folder's fsync
///   failed.
void write_file_atomically(const std::filesystem::path& path,
                           const std::function<void(const std::filesystem::path&)>& write);

/// Writes `bytes` in this way. A file that is not regular, such as /dev/stdout or a FIFO, is
/// written directly.
void write_file_atomically(const std::filesystem::path& path, std::string_view bytes);

/// Throws at once what write_file_atomically() would throw later because of the path, for files
/// that are written after long work. Creates missing folders as well. A FIFO needs a reader.
void check_can_write(const std::filesystem::path& path);

/// Throws for the errno `error` of a failed file operation: UserError if the path is wrong
/// (missing, not permitted, too long), UnavailableError if the disk failed.
[[noreturn]] void throw_file_error(const std::string& what, int error);

/// Whether there is a file or a folder; false where that cannot be found out.
bool exists(const std::filesystem::path& path);

/// Reads the whole file, or all that comes from a pipe or a device. @throws UserError naming the
/// file if it cannot be read, or is larger than `max_bytes`, and pipes and devices than 64 MiB.
std::string read_file(const std::filesystem::path& path, size_t max_bytes = SIZE_MAX);

}  // namespace syncbn::base
