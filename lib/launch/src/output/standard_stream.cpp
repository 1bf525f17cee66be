#include "output/standard_stream.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace syncbn::launch {

StandardStream::StandardStream(int fd) : fd_(fd) {
  struct stat what {};
  if (::fstat(fd, &what) != 0) return;
  type_ = what.st_mode & S_IFMT;
  if (type_ != S_IFIFO && type_ != S_IFCHR) return;
  own_.reset(::open(fmt::format("/proc/self/fd/{}", fd).c_str(),
                    O_WRONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY));
}

void StandardStream::write(std::string_view text) {
  if (closed_) return;
  if (pending() == 0) {
    while (!text.empty()) {
      const auto written = write_some(text);
      if (!written) break;
      text.remove_prefix(*written);
    }
  }
  if (!closed_) pending_.append(text);
}

void StandardStream::flush() {
  while (!closed_ && pending() > 0) {
    const auto written = write_some(pending_.view());
    if (!written) return;
    pending_.consume(*written);
  }
  if (closed_) pending_.clear();
}

std::optional<size_t> StandardStream::write_some(std::string_view text) {
  // A pipe that cannot be opened again takes this many bytes without blocking once poll() says so.
  constexpr size_t kMaxAtOnce = 4096;
  ssize_t written = 0;
  if (own_ || type_ == S_IFREG) {
    written = ::write(fd(), text.data(), text.size());
  } else if (type_ == S_IFSOCK) {
    written = ::send(fd_, text.data(), text.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  } else {
    pollfd ready{fd_, POLLOUT, 0};
    if (::poll(&ready, 1, 0) == 0) return std::nullopt;
    written = ::write(fd_, text.data(), std::min(text.size(), kMaxAtOnce));
  }
  if (written >= 0) return static_cast<size_t>(written);
  if (errno == EINTR) return 0;
  if (errno == EAGAIN) return std::nullopt;
  closed_ = true;
  // isatty() is false for a terminal that was closed, so any device counts.
  const bool has_no_reader = errno == EPIPE || (errno == EIO && type_ == S_IFCHR);
  if (!has_no_reader) error_ = errno;
  return text.size();
}

}  // namespace syncbn::launch
