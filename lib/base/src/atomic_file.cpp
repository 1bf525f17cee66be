#include <syncbn/base/atomic_file.h>

#include <fcntl.h>
#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/open_file.h>
#include <syncbn/base/random.h>
#include <syncbn/base/text.h>
#include <syncbn/base/unique_fd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

namespace syncbn::base {
namespace {

namespace fs = std::filesystem;

// Errors that another path may avoid.
constexpr std::array kPathErrors{EACCES, EEXIST,  EISDIR, ELOOP, ENAMETOOLONG,
                                 ENOENT, ENOTDIR, EPERM,  EROFS};

// Errors of opening a file that say nothing about the path: the file may be there and whole.
constexpr std::array kPassingErrors{EIO, EMFILE, ENFILE, ENOMEM, ESTALE, ETIMEDOUT};

// Upper bound in bytes on what is read from a pipe or a device, which may never end.
constexpr size_t kMaxOfStream = size_t{64} << 20;

void sync_to_disk(const fs::path& path) {
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd || ::fsync(fd.get()) != 0) throw_errno(fmt::format("cannot sync {}", path.string()));
}

/// Ignores folders without read permission, and file systems that cannot sync folders (SMB, FUSE).
void sync_folder_to_disk(const fs::path& folder) {
  UniqueFd fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (fd ? ::fsync(fd.get()) == 0 || errno == EINVAL || errno == EBADF : errno == EACCES) return;
  throw_errno(fmt::format("cannot sync {}", folder.string()));
}

// The target of a symbolic link. It need not exist.
fs::path link_target(fs::path path) {
  constexpr int kMaxLinks = 40;  // the kernel's limit
  std::error_code error;
  for (int i = 0; i < kMaxLinks && fs::is_symlink(path, error); ++i) {
    path = path.parent_path() / fs::read_symlink(path, error);
  }
  return path;
}

// Whether a file must not be replaced: a device, a FIFO, or the name of an open file, such as
// /dev/stdout.
bool is_special(const fs::path& link) {
  const std::string name = fs::absolute(link).lexically_normal().string();
  std::error_code error;
  const fs::file_status status = fs::status(link, error);
  if (!fs::exists(status) || fs::is_directory(status)) return false;
  return !fs::is_regular_file(status) || name.starts_with("/dev/std") ||
         name.starts_with("/dev/fd/") || name.starts_with("/proc/");
}

/// A new name for a temporary file for `path`. Creates the folder.
fs::path temporary_of(const fs::path& path) {
  const fs::path folder = path.has_parent_path() ? path.parent_path() : fs::path(".");
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) {
    throw_file_error(fmt::format("cannot create the folder {}", folder.string()), error.value());
  }
  constexpr size_t kMaxOfName = 200;  // a file name may have 255 bytes
  // Not this process's id: containers that share a file system run processes of the same id.
  return folder /
         fmt::format(".{}.{}.tmp", path.filename().string().substr(0, kMaxOfName), random_id());
}

void write_all(const UniqueFd& fd, std::string_view bytes, const fs::path& path) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd.get(), bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw_errno(fmt::format("cannot write {}", path.string()));
    bytes.remove_prefix(static_cast<size_t>(n));
  }
}

// O_NONBLOCK: opening a FIFO without a reader fails instead of waiting.
UniqueFd open_special(const fs::path& path) {
  UniqueFd fd(::open(path.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!fd) throw_file_error(fmt::format("cannot open {}", path.string()), errno);
  ::fcntl(fd.get(), F_SETFL, ::fcntl(fd.get(), F_GETFL) & ~O_NONBLOCK);
  return fd;
}

}  // namespace

void write_file_atomically(const fs::path& link,
                           const std::function<void(const fs::path&)>& write) {
  if (is_special(link)) {
    throw UserError(fmt::format("cannot write {}: it is not a regular file; choose another path",
                                link.string()));
  }
  const fs::path path = link_target(link);
  const fs::path temporary = temporary_of(path);
  struct stat old {};
  const bool is_there = ::stat(path.c_str(), &old) == 0;
  std::error_code error;
  try {
    // Until it is complete, a file that replaces another is for its owner.
    if (is_there) UniqueFd(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600)).reset();
    write(temporary);
    sync_to_disk(temporary);  // before the old permissions, which may forbid to open it
    if (is_there) ::chmod(temporary.c_str(), old.st_mode & ACCESSPERMS);
    if (::rename(temporary.c_str(), path.c_str()) != 0) {
      throw_file_error(fmt::format("cannot move {} to {}", temporary.string(), path.string()),
                       errno);
    }
  } catch (...) {
    fs::remove(temporary, error);
    throw;
  }
  sync_folder_to_disk(temporary.parent_path());
}

void write_file_atomically(const fs::path& path, std::string_view bytes) {
  if (is_special(path)) return write_all(open_special(path), bytes, path);
  write_file_atomically(path, [&](const fs::path& temporary) {
    UniqueFd fd(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
    if (!fd) throw_file_error(fmt::format("cannot create {}", temporary.string()), errno);
    write_all(fd, bytes, temporary);
  });
}

void check_can_write(const fs::path& link) {
  if (is_special(link)) {
    open_special(link);
    return;
  }
  const fs::path path = link_target(link);
  std::error_code error;
  if (fs::is_directory(path, error)) {
    throw_file_error(fmt::format("cannot write {}", link.string()), EISDIR);
  }
  const fs::path temporary = temporary_of(path);
  const UniqueFd fd(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666));
  if (!fd) throw_file_error(fmt::format("cannot write {}", link.string()), errno);
  fs::remove(temporary, error);
}

void throw_file_error(const std::string& what, int error) {
  const std::string message = fmt::format("{}: {}", what, describe_errno(error));
  if (std::ranges::count(kPathErrors, error) > 0) throw PathError(message);
  throw UnavailableError(message);
}

bool exists(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

std::string read_file(const fs::path& path, size_t max_bytes) {
  std::error_code error;
  if (fs::is_directory(path, error)) {
    throw UserError(fmt::format("cannot read {}: it is a folder", path.string()));
  }
  const UniqueFd file = open_to_read(path);
  if (!file) {
    const int reason = errno;
    const std::string message =
        fmt::format("cannot read {}: {}", path.string(), open_error(path, reason));
    if (std::ranges::count(kPassingErrors, reason) > 0) throw UnavailableError(message);
    throw UserError(message);
  }
  if (!fs::is_regular_file(path, error)) max_bytes = std::min(max_bytes, kMaxOfStream);
  std::string bytes;
  std::array<char, 65536> chunk;
  for (;;) {
    const ssize_t n = ::read(file.get(), chunk.data(), chunk.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw_errno(fmt::format("cannot read {}", path.string()));
    if (n == 0) return bytes;
    bytes.append(chunk.data(), static_cast<size_t>(n));
    if (bytes.size() <= max_bytes) continue;
    throw UserError(fmt::format("{} is larger than {}", path.string(), format_bytes(max_bytes)));
  }
}

}  // namespace syncbn::base
