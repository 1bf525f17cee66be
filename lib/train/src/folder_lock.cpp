#include "folder_lock.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <sys/file.h>

#include <cerrno>
#include <system_error>

namespace syncbn::train {

namespace fs = std::filesystem;

base::UniqueFd lock_folder(const fs::path& folder, const std::string& advice) {
  std::error_code error;
  fs::create_directories(folder, error);
  base::UniqueFd fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd) {
    base::throw_file_error(fmt::format("cannot create the folder {}", folder.string()),
                           error ? error.value() : errno);
  }
  if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    throw base::UserError(
        fmt::format("another process is writing to {}; {}", folder.string(), advice));
  }
  return fd;
}

bool is_locked(const fs::path& folder) {
  const base::UniqueFd fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  return fd && ::flock(fd.get(), LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
}

}  // namespace syncbn::train
