#pragma once

#include <syncbn/base/unique_fd.h>
#include <sys/epoll.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace syncbn::launch {

/// Both ends are closed on exec.
struct Pipe {
  base::UniqueFd reader;
  base::UniqueFd writer;

  /// @throws base::UnavailableError if no descriptors are left.
  static Pipe make();
};

void set_nonblocking(const base::UniqueFd& fd);

enum class Closing { kNow, kOnExec };

/// close_range(2), called by number because kernel headers before 5.9 and glibc before 2.34 lack
/// it; close_listed() on kernels that refuse it.
void close_descriptors(unsigned first, unsigned last, Closing when = Closing::kNow);
/// The same by reading /proc/self/fd.
void close_listed(unsigned first, unsigned last, Closing when);

/// Upper bound on connections that have not yet identified themselves as launchers or store
/// clients: a quarter of this process's descriptor limit. The store's clients have another quarter,
/// and this process needs the rest.
size_t max_newcomers();

/// A descriptor to give to drop_connection().
base::UniqueFd open_spare();
/// Accepts and closes a connection when no descriptor is free; otherwise poll() would report it
/// forever.
/// @param spare closed to free a descriptor, then opened again.
void drop_connection(int listener, base::UniqueFd& spare);

/// Sets a timerfd to expire once, after `time`; 0 stops it.
void set_timer(const base::UniqueFd& timer, std::chrono::milliseconds time);

using ReadBuffer = std::array<char, 65536>;
/// Reads from a non-blocking pipe into `buffer` and returns what it read, perhaps nothing. Closes
/// `fd` at the end of the stream.
std::string_view read_some(base::UniqueFd& fd, ReadBuffer& buffer);

/// What a file holds from `start` on, at most `max_bytes`; "" if it cannot be read.
std::string read_at(int fd, off_t start, size_t max_bytes);

/// A set of descriptors to wait for through one descriptor (epoll). Not thread-safe.
class WatchSet {
 public:
  /// @param purpose the beginning of error messages, such as "cannot watch the workers".
  /// @throws base::UnavailableError if no descriptors are left.
  explicit WatchSet(const char* purpose);

  /// Readable when one of the set is ready.
  int fd() const { return epoll_.get(); }
  /// The descriptors that are ready now, at most `max`, in ascending order.
  std::vector<int> ready(size_t max) const;

  /// @param events epoll's. @throws base::UnavailableError if the system refuses.
  void add(int fd, uint32_t events = EPOLLIN);
  /// Like add(), but returns false, with errno set, if the system refuses.
  bool try_add(int fd, uint32_t events = EPOLLIN) { return control(EPOLL_CTL_ADD, fd, events); }
  void change(int fd, uint32_t events) { control(EPOLL_CTL_MOD, fd, events); }
  void remove(int fd) { control(EPOLL_CTL_DEL, fd, 0); }

 private:
  bool control(int operation, int fd, uint32_t events) const;

  const char* purpose_;
  base::UniqueFd epoll_;
};

}  // namespace syncbn::launch
