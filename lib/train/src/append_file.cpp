#include "append_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/unique_fd.h>
#include <unistd.h>

#include <cerrno>

namespace syncbn::train {

void append_to_file(const std::filesystem::path& file, std::string_view bytes) {
  const base::UniqueFd descriptor(
      ::open(file.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
  if (!descriptor) base::throw_file_error(fmt::format("cannot open {}", file.string()), errno);
  write_at_once(descriptor.get(), file, bytes);
}

void write_at_once(int descriptor, const std::filesystem::path& file, std::string_view bytes) {
  const ssize_t written = ::write(descriptor, bytes.data(), bytes.size());
  if (written == static_cast<ssize_t>(bytes.size())) return;
  // A short write means that the disk is full.
  base::throw_file_error(fmt::format("cannot write {}", file.string()),
                         written < 0 ? errno : ENOSPC);
}

}  // namespace syncbn::train
