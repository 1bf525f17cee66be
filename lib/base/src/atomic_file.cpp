#include <syncbn/base/atomic_file.h>

#include <fcntl.h>
#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/unique_fd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>

namespace syncbn::base {
namespace {

namespace fs = std::filesystem;

bool is_fault_of_the_path(int error) {
  switch (error) {
    case EACCES:
    case EEXIST:
    case EISDIR:
    case ELOOP:
    case ENAMETOOLONG:
    case ENOENT:
    case ENOTDIR:
    case EPERM:
    case EROFS:
      return true;
    default:
      return false;
  }
}

void sync_to_disk(const fs::path& path, int flags) {
  UniqueFd fd(::open(path.c_str(), flags | O_CLOEXEC));
  if (!fd || ::fsync(fd.get()) != 0) throw_errno(fmt::format("cannot sync {}", path.string()));
}

}  // namespace

void write_file_atomically(const fs::path& path,
                           const std::function<void(const fs::path&)>& write) {
  const fs::path folder = path.has_parent_path() ? path.parent_path() : fs::path(".");
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) {
    throw_file_error(fmt::format("cannot create the folder {}", folder.string()), error.value());
  }
  const fs::path temporary =
      folder / fmt::format(".{}.{}.tmp", path.filename().string(), ::getpid());
  try {
    write(temporary);
    sync_to_disk(temporary, O_RDONLY);
    if (::rename(temporary.c_str(), path.c_str()) != 0) {
      throw_file_error(fmt::format("cannot move {} to {}", temporary.string(), path.string()),
                       errno);
    }
  } catch (...) {
    fs::remove(temporary, error);
    throw;
  }
  sync_to_disk(folder, O_RDONLY | O_DIRECTORY);
}

void write_file_atomically(const fs::path& path, std::string_view bytes) {
  write_file_atomically(path, [&](const fs::path& temporary) {
    UniqueFd fd(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
    if (!fd) throw_file_error(fmt::format("cannot create {}", temporary.string()), errno);
    size_t done = 0;
    while (done < bytes.size()) {
      const ssize_t n = ::write(fd.get(), bytes.data() + done, bytes.size() - done);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) throw_errno(fmt::format("cannot write {}", temporary.string()));
      done += static_cast<size_t>(n);
    }
  });
}

void throw_file_error(const std::string& what, int error) {
  const std::string message = fmt::format("{}: {}", what, std::strerror(error));
  if (is_fault_of_the_path(error)) throw UserError(message + "; choose another path");
  throw UnavailableError(message);
}

std::string read_file(const fs::path& path) {
  std::error_code error;
  if (fs::is_directory(path, error)) {
    throw UserError(fmt::format("cannot read {}: it is a folder", path.string()));
  }
  std::ifstream file(path, std::ios::binary);
  if (!file)
    throw UserError(fmt::format("cannot read {}: {}", path.string(), std::strerror(errno)));
  std::ostringstream bytes;
  bytes << file.rdbuf();
  if (file.bad()) throw UnavailableError(fmt::format("reading {} failed", path.string()));
  return std::move(bytes).str();
}

}  // namespace syncbn::base
