#include "common/watch_set.h"

#include <syncbn/base/error.h>

namespace syncbn::launch {

WatchSet::WatchSet(const char* purpose)
    : purpose_(purpose), epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
  if (!epoll_) base::throw_errno(purpose_);
}

void WatchSet::add(int fd, uint32_t events) {
  if (!try_add(fd, events)) base::throw_errno(purpose_);
}

bool WatchSet::try_add(int fd, uint32_t events) {
  epoll_event event{.events = events, .data = {}};
  return ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0;
}

void WatchSet::change(int fd, uint32_t events) {
  epoll_event event{.events = events, .data = {}};
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

void WatchSet::remove(int fd) {
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
}

}  // namespace syncbn::launch
