#pragma once

#include <syncbn/base/unique_fd.h>
#include <sys/epoll.h>

#include <cstdint>

namespace syncbn::launch {

/// Descriptors that somebody waits for together, by way of one. Not thread-safe.
class WatchSet {
 public:
  /// @param purpose begins the message of an error, as "cannot watch the workers".
  /// @throws base::UnavailableError when the system has no descriptors left.
  explicit WatchSet(const char* purpose);

  /// Readable when one of the others is ready.
  int fd() const { return epoll_.get(); }

  /// @param events as of epoll. @throws base::UnavailableError when the system refuses.
  void add(int fd, uint32_t events = EPOLLIN);
  /// The same for what can be done without. @return false, and errno, when the system refuses.
  bool try_add(int fd, uint32_t events = EPOLLIN);
  /// Waits for other events of a descriptor from now on.
  void change(int fd, uint32_t events);
  void remove(int fd);

 private:
  const char* purpose_;
  base::UniqueFd epoll_;
};

}  // namespace syncbn::launch
