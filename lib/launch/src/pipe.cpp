#include "pipe.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <unistd.h>

#include <cerrno>

namespace syncbn::launch {

Pipe Pipe::make() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) {
    base::throw_errno(fmt::format("cannot make a pipe for a worker{}",
                                  errno == EMFILE ? " (see `ulimit -n`)" : ""));
  }
  return {base::UniqueFd(ends[0]), base::UniqueFd(ends[1])};
}

void set_nonblocking(const base::UniqueFd& fd) {
  ::fcntl(fd.get(), F_SETFL, O_NONBLOCK);
}

}  // namespace syncbn::launch
