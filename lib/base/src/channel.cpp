#include <syncbn/base/channel.h>

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

namespace syncbn::base {
namespace {

/// A socket raises no SIGPIPE after its peer has closed; for pipes, the program must ignore
/// SIGPIPE.
ssize_t write_to(int fd, std::string_view bytes) {
  const ssize_t sent = ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  return sent < 0 && errno == ENOTSOCK ? ::write(fd, bytes.data(), bytes.size()) : sent;
}

}  // namespace

Channel::Channel(UniqueFd fd, size_t max_unsent) : fd_(std::move(fd)), max_unsent_(max_unsent) {
  ::fcntl(fd_.get(), F_SETFL, ::fcntl(fd_.get(), F_GETFL) | O_NONBLOCK);
  const int on = 1;
  ::setsockopt(fd_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));  // fails unless it is TCP
}

void Channel::queue(std::string_view bytes) {
  if (!is_open() || cannot_send_ || ended_) return;
  output_.append(bytes);
  if (output_.size() > max_unsent_) flush();
  if (output_.size() > max_unsent_) break_output(ENOBUFS);
}

void Channel::flush() {
  while (is_open() && !output_.empty()) {
    const ssize_t sent = write_to(fd(), output_.view());
    if (sent >= 0) {
      output_.consume(static_cast<size_t>(sent));
    } else if (errno == EAGAIN) {
      return;
    } else if (errno != EINTR) {
      break_output(errno);
    }
  }
}

/// receive() still reads what the peer sent before; then the channel ends.
void Channel::break_output(int error) {
  cannot_send_ = true;
  error_ = error;
  output_.clear();
  ::shutdown(fd(), SHUT_RDWR);  // wakes the owner's poll(); a pipe without a reader does so itself
}

void Channel::receive(size_t max) {
  std::array<char, 65536> buffer;
  for (size_t total = 0; !ended_ && total < max;) {
    const size_t wanted = std::min(buffer.size(), max - total);
    const ssize_t got = ::read(fd(), buffer.data(), wanted);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) break;
    if (got < 0 && error_ == 0) error_ = errno;
    ended_ = got <= 0;
    if (ended_) break;
    input_.append({buffer.data(), static_cast<size_t>(got)});
    total += static_cast<size_t>(got);
    // A short read has emptied the socket; the next call sees the end, if there is one.
    if (static_cast<size_t>(got) < wanted) break;
  }
}

std::optional<std::string> Channel::next_line(size_t max_size) {
  auto line = input_.next_line();
  if (!line && input_.size() > max_size) fail(EMSGSIZE);
  return line;
}

void Channel::fail(int error) {
  ended_ = true;
  error_ = error;
  input_.clear();
  output_.clear();
}

}  // namespace syncbn::base
