#include "records/folder_lock.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/base/open_file.h>
#include <syncbn/base/private_folder.h>

#include <cerrno>
#include <chrono>
#include <thread>

namespace syncbn::train {

namespace fs = std::filesystem;

namespace {

constexpr const char* kFile = ".lock";
// A process that was killed keeps its locks until the kernel has freed its memory.
constexpr auto kPatience = std::chrono::seconds(3);

/// A lock of the whole file, owned by the open file description: closing another descriptor of the
/// file, as is_locked() does, does not release it.
struct flock whole_file() {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  return lock;
}

}  // namespace

base::UniqueFd lock_folder(const fs::path& folder, const std::string& advice) {
  if (const int error = base::make_private_folder(folder); error != 0) {
    base::throw_file_error(fmt::format("cannot create the folder {}", folder.string()), error);
  }
  const fs::path file = folder / kFile;
  base::UniqueFd fd(::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0666));
  if (!fd) base::throw_file_error(fmt::format("cannot create {}", file.string()), errno);
  struct flock lock = whole_file();
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (::fcntl(fd.get(), F_OFD_SETLK, &lock) != 0 && (errno == EAGAIN || errno == EACCES)) {
    if (std::chrono::steady_clock::now() > deadline) {
      throw base::UserError(
          fmt::format("another process is writing to {}; {}", folder.string(), advice));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return fd;
}

bool is_locked(const fs::path& folder) {
  const base::UniqueFd fd = base::open_to_read(folder / kFile);
  struct flock lock = whole_file();
  return fd && ::fcntl(fd.get(), F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

}  // namespace syncbn::train
