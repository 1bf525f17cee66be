#include "watch/watch_link.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <syncbn/base/text.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>

namespace syncbn::dist::detail {
namespace {

// A host that loses its power says nothing: it is given up after 5 + 3 * 2 seconds.
constexpr int kQuietSeconds = 5;
constexpr int kProbeSeconds = 2;
constexpr int kProbes = 3;
// The same where it owes an answer, since there are no probes then.
constexpr unsigned kUnansweredMilliseconds = 1000 * (kQuietSeconds + kProbes * kProbeSeconds);
// Nobody of ours sends a line as long as this.
constexpr size_t kLongestLine = size_t{64} * 1024;
// Then it is others' turn.
constexpr size_t kAtOnce = size_t{256} * 1024;

std::string printable(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return c < ' '; }, ' ');
  return text;
}

}  // namespace

std::string Message::line() const {
  std::string text = fmt::format("{}\t{}\t{}", from, to, type);
  for (const std::string& field : fields) {
    text += '\t';
    text += printable(field);
  }
  return text + "\n";
}

std::optional<Message> Message::parse(const std::string& line) {
  std::vector<std::string> parts;
  for (size_t begin = 0;;) {
    const size_t end = line.find('\t', begin);
    parts.push_back(line.substr(begin, end - begin));
    if (end == std::string::npos) break;
    begin = end + 1;
  }
  if (parts.size() < 3) return std::nullopt;
  const auto from = base::parse_number<int>(parts[0]);
  const auto to = base::parse_number<int>(parts[1]);
  if (!from || !to) return std::nullopt;
  Message message;
  message.from = *from;
  message.to = *to;
  message.type = parts[2];
  message.fields.assign(parts.begin() + 3, parts.end());
  return message;
}

std::string Message::field(size_t index) const {
  return index < fields.size() ? fields[index] : "";
}

uint64_t Message::number(size_t index) const {
  return base::parse_number<uint64_t>(field(index)).value_or(0);
}

WatchLink::WatchLink(base::UniqueFd fd, int the_peer, std::string its_where)
    : peer(the_peer), where(std::move(its_where)), fd_(std::move(fd)) {
  const int on = 1;
  ::fcntl(fd_.get(), F_SETFL, ::fcntl(fd_.get(), F_GETFL) | O_NONBLOCK);
  ::setsockopt(fd_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  ::setsockopt(fd_.get(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  ::setsockopt(fd_.get(), IPPROTO_TCP, TCP_KEEPIDLE, &kQuietSeconds, sizeof(kQuietSeconds));
  ::setsockopt(fd_.get(), IPPROTO_TCP, TCP_KEEPINTVL, &kProbeSeconds, sizeof(kProbeSeconds));
  ::setsockopt(fd_.get(), IPPROTO_TCP, TCP_KEEPCNT, &kProbes, sizeof(kProbes));
  ::setsockopt(fd_.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, &kUnansweredMilliseconds,
               sizeof(kUnansweredMilliseconds));
}

void WatchLink::send(const std::string& line) {
  output_ += line;
  flush();
}

void WatchLink::flush() {
  while (fd_ && !output_.empty()) {
    const ssize_t sent =
        ::send(fd_.get(), output_.data(), output_.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && errno == EAGAIN) return;
    if (sent < 0) {
      output_.clear();  // receive() will see the end
      return;
    }
    output_.erase(0, static_cast<size_t>(sent));
  }
}

bool WatchLink::receive(std::vector<std::string>& lines) {
  std::array<char, 4096> buffer;
  for (size_t total = 0; total < kAtOnce;) {
    const ssize_t got = ::recv(fd_.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) break;
    if (got <= 0) return false;
    input_.append(buffer.data(), static_cast<size_t>(got));
    total += static_cast<size_t>(got);
    take_lines(lines);
    if (input_.size() >= kLongestLine) return false;
  }
  return true;
}

/// Leaves a line in the input that is not whole.
void WatchLink::take_lines(std::vector<std::string>& lines) {
  size_t begin = 0;
  for (size_t end; (end = input_.find('\n', begin)) != std::string::npos; begin = end + 1) {
    lines.push_back(input_.substr(begin, end - begin));
  }
  input_.erase(0, begin);
}

}  // namespace syncbn::dist::detail
