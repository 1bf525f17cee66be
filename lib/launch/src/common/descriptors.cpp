#include "common/descriptors.h"

#include <fcntl.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "common/processes.h"

namespace syncbn::launch {

Pipe Pipe::make() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) base::throw_errno("cannot make a pipe for a worker");
  return {base::UniqueFd(ends[0]), base::UniqueFd(ends[1])};
}

void set_nonblocking(const base::UniqueFd& fd) {
  ::fcntl(fd.get(), F_SETFL, ::fcntl(fd.get(), F_GETFL) | O_NONBLOCK);
}

void close_descriptors(unsigned first, unsigned last, Closing when) {
  // SYS_close_range and CLOSE_RANGE_CLOEXEC, which kernel headers before 5.9 and 5.11 lack.
  constexpr long kCloseRange = 436;
  const unsigned flags = when == Closing::kOnExec ? 4 : 0;
  if (::syscall(kCloseRange, first, last, flags) != 0) close_listed(first, last, when);
}

void close_listed(unsigned first, unsigned last, Closing when) {
  std::vector<int> descriptors;
  for (const std::filesystem::path& entry : entries_of("/proc/self/fd")) {
    const auto fd = base::parse_number<unsigned>(entry.filename().native());
    if (fd && *fd >= first && *fd <= last) descriptors.push_back(static_cast<int>(*fd));
  }
  for (const int fd : descriptors) {
    if (when == Closing::kNow) {
      ::close(fd);
    } else {
      ::fcntl(fd, F_SETFD, FD_CLOEXEC);
    }
  }
}

size_t max_newcomers() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return 256;
  return std::max<size_t>(1, limit.rlim_cur / 4);
}

base::UniqueFd open_spare() {
  return base::UniqueFd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
}

void drop_connection(int listener, base::UniqueFd& spare) {
  if (!spare) spare = open_spare();
  spare.reset();
  base::UniqueFd(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC)).reset();
  spare = open_spare();
}

void set_timer(const base::UniqueFd& timer, std::chrono::milliseconds time) {
  const std::chrono::nanoseconds rest = time % std::chrono::seconds(1);
  const itimerspec spec{{}, {.tv_sec = time.count() / 1000, .tv_nsec = rest.count()}};
  ::timerfd_settime(timer.get(), 0, &spec, nullptr);
}

std::string_view read_some(base::UniqueFd& fd, ReadBuffer& buffer) {
  if (!fd) return {};
  const ssize_t got = ::read(fd.get(), buffer.data(), buffer.size());
  if (got == 0) fd.reset();
  if (got <= 0) return {};
  return {buffer.data(), static_cast<size_t>(got)};
}

std::string read_at(int fd, off_t start, size_t max_bytes) {
  std::string text(max_bytes, '\0');
  const ssize_t got = ::pread(fd, text.data(), max_bytes, start);
  text.resize(static_cast<size_t>(std::max<ssize_t>(got, 0)));
  return text;
}

WatchSet::WatchSet(const char* purpose)
    : purpose_(purpose), epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
  if (!epoll_) base::throw_errno(purpose_);
}

std::vector<int> WatchSet::ready(size_t max) const {
  std::vector<epoll_event> events(max);
  const int count = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(max), 0);
  std::vector<int> descriptors;
  descriptors.reserve(static_cast<size_t>(std::max(count, 0)));
  for (int i = 0; i < count; ++i) descriptors.push_back(events[static_cast<size_t>(i)].data.fd);
  std::ranges::sort(descriptors);
  return descriptors;
}

void WatchSet::add(int fd, uint32_t events) {
  if (!try_add(fd, events)) base::throw_errno(purpose_);
}

bool WatchSet::control(int operation, int fd, uint32_t events) const {
  epoll_event event{.events = events, .data = {.fd = fd}};
  return ::epoll_ctl(epoll_.get(), operation, fd, &event) == 0;
}

}  // namespace syncbn::launch
