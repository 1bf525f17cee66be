#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>

#include <syncbn/base/error.h>

namespace syncbn::base {

/// Replaces `path`, or the target of a symbolic link, by a temporary file in the same folder, which
/// `write` fills: fsync, rename, fsync of the folder. Creates missing folders. A reader sees the
/// whole old file or the whole new one. The new one has the permissions of the old one.
/// @throws UserError or UnavailableError (see throw_file_error) naming the file and the reason. The
///   temporary file is removed, and the old file is unchanged unless only the folder's fsync
///   failed.
void write_file_atomically(const std::filesystem::path& path,
                           const std::function<void(const std::filesystem::path&)>& write);

/// The same, with `bytes` as the content. Writes directly to a file that is not regular, such as
/// /dev/stdout or a FIFO.
void write_file_atomically(const std::filesystem::path& path, std::string_view bytes);

/// Throws the errors of write_file_atomically() that the path causes. Call it before long work
/// whose result goes to `path`. Creates missing folders as well. A FIFO needs a reader.
void check_can_write(const std::filesystem::path& path);

/// A path that cannot be used: missing, not permitted, too long.
class PathError : public UserError {
 public:
  explicit PathError(const std::string& reason)
      : UserError(reason + "; choose another path"), reason_(reason) {}

  /// The message without the advice.
  const std::string& reason() const { return reason_; }

 private:
  std::string reason_;
};

/// Throws for the errno `error` of a failed file operation: PathError if the path is wrong,
/// UnavailableError if the disk failed.
[[noreturn]] void throw_file_error(const std::string& what, int error);

/// Whether `path` is a file or a folder; false if that cannot be determined.
bool exists(const std::filesystem::path& path);

/// Reads a whole file, pipe or device.
/// @throws UserError naming the file if its path is wrong or it has more than `max_bytes` (a pipe
/// or
///   device: more than 64 MiB); UnavailableError if the disk fails or a limit is reached.
std::string read_file(const std::filesystem::path& path, size_t max_bytes = SIZE_MAX);

}  // namespace syncbn::base
