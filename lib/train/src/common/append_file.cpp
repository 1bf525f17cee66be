#include "common/append_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/unique_fd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace syncbn::train {

void append_to_file(const std::filesystem::path& file, std::string_view bytes) {
  const base::UniqueFd descriptor(
      ::open(file.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
  if (!descriptor) base::throw_file_error(fmt::format("cannot open {}", file.string()), errno);
  write_at_once(descriptor.get(), file, bytes);
}

void write_at_once(int descriptor, const std::filesystem::path& file, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor, bytes.data(), bytes.size());
    if (written < 0 && errno != EINTR) {
      base::throw_file_error(fmt::format("cannot write {}", file.string()), errno);
    }
    // Only a full disk takes less than all. The next write then tells whether it is a limit.
    bytes.remove_prefix(static_cast<size_t>(std::max<ssize_t>(written, 0)));
  }
}

}  // namespace syncbn::train
