#include "common/append_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace syncbn::train {

base::UniqueFd open_to_append(const std::filesystem::path& file) {
  // O_NONBLOCK, so that open() does not wait for the reader of a FIFO; without one it fails with
  // ENXIO.
  base::UniqueFd descriptor(::open(
      file.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0666));
  struct stat about {};
  if (!descriptor && errno != ENXIO) {
    base::throw_file_error(fmt::format("cannot open {}", file.string()), errno);
  }
  if (!descriptor || ::fstat(descriptor.get(), &about) != 0 || !S_ISREG(about.st_mode)) {
    throw base::UserError(
        fmt::format("cannot write {}: it is not a regular file; remove it", file.string()));
  }
  return descriptor;
}

void append_to_file(const std::filesystem::path& file, std::string_view bytes) {
  write_at_once(open_to_append(file).get(), file, bytes);
}

void write_at_once(int descriptor, const std::filesystem::path& file, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor, bytes.data(), bytes.size());
    if (written < 0 && errno != EINTR) {
      base::throw_file_error(fmt::format("cannot write {}", file.string()), errno);
    }
    // Only a full disk or a limit takes fewer bytes than all; the next write reports the error.
    bytes.remove_prefix(static_cast<size_t>(std::max<ssize_t>(written, 0)));
  }
}

}  // namespace syncbn::train
