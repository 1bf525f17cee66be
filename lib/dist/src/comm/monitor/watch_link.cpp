#include "monitor/watch_link.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <syncbn/base/socket.h>
#include <syncbn/base/text.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>

namespace syncbn::dist::detail {
namespace {

// Upper bound on the first line of a process, which may be a stranger. The leave notice of a rank
// grows with the number of its groups.
constexpr size_t kMaxGreeting = size_t{64} * 1024;
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
  base::detect_lost_host(fd_.get());
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
    const size_t searched = input_.size();
    input_.append(buffer.data(), static_cast<size_t>(got));
    total += static_cast<size_t>(got);
    take_lines(searched, lines);
    if (peer < 0 && lines.empty() && input_.size() >= kMaxGreeting) return false;
  }
  return true;
}

/// Leaves a line in the input that is not whole. @param searched no line ends before it.
void WatchLink::take_lines(size_t searched, std::vector<std::string>& lines) {
  size_t begin = 0;
  for (size_t end = input_.find('\n', searched); end != std::string::npos;
       end = input_.find('\n', begin)) {
    lines.push_back(input_.substr(begin, end - begin));
    begin = end + 1;
  }
  input_.erase(0, begin);
}

}  // namespace syncbn::dist::detail
