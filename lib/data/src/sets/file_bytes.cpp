#include "sets/file_bytes.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>

namespace syncbn::data::detail {
namespace {

bool is_cached(const base::UniqueFd& file, int64_t offset) {
  char byte = 0;
  const iovec one{&byte, 1};
  return ::preadv2(file.get(), &one, 1, offset, RWF_NOWAIT) == 1;
}

}  // namespace

base::UniqueFd open_file(const std::filesystem::path& path) {
  // Not blocking, so that a FIFO is refused below and not waited for.
  base::UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file) base::throw_file_error(fmt::format("cannot read {}", path.string()), errno);
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) base::throw_errno("cannot read " + path.string());
  if (!S_ISREG(status.st_mode)) {
    throw base::UserError(fmt::format("cannot read {}: it is no regular file", path.string()));
  }
  return file;
}

int64_t size_of_file(const base::UniqueFd& file, const std::filesystem::path& path) {
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) base::throw_errno("cannot read " + path.string());
  return status.st_size;
}

void read_at(const base::UniqueFd& file, const std::filesystem::path& path, int64_t offset,
             int64_t size, std::vector<uint8_t>& bytes) {
  bytes.resize(static_cast<size_t>(size));
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t got = ::pread(file.get(), bytes.data() + done, bytes.size() - done,
                                offset + static_cast<int64_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) base::throw_errno("reading " + path.string());
    if (got == 0) {
      throw base::UserError(
          fmt::format("{} ends at byte {}, where more was expected; it was cut "
                      "short",
                      path.string(), offset + static_cast<int64_t>(done)));
    }
    done += static_cast<size_t>(got);
  }
}

void read_ahead(const base::UniqueFd& file, int64_t offset, int64_t size) {
  // The kernel cuts a request off at its read-ahead window, of which this is the default.
  constexpr int64_t kPiece = 128 << 10;
  constexpr int64_t kBlock = 8 * kPiece;
  const int64_t end = offset + size;
  for (int64_t block = offset; block < end; block += kBlock) {
    const int64_t block_end = std::min(block + kBlock, end);
    // Looking at one byte is quicker than letting the kernel look at each page of what is there.
    if (is_cached(file, block_end - 1)) continue;
    for (int64_t at = block; at < block_end; at += kPiece) {
      ::posix_fadvise(file.get(), at, std::min(kPiece, block_end - at), POSIX_FADV_WILLNEED);
    }
  }
}

void read_whole_file(const std::filesystem::path& path, std::vector<uint8_t>& bytes) {
  const base::UniqueFd file = open_file(path);
  read_at(file, path, 0, size_of_file(file, path), bytes);
}

std::vector<uint8_t>& thread_buffer() {
  thread_local std::vector<uint8_t> buffer;
  return buffer;
}

}  // namespace syncbn::data::detail
