#pragma once

#include <syncbn/base/unique_fd.h>

namespace syncbn::launch {

/// Both ends are closed on exec. @throws base::UnavailableError where there is no room for more.
struct Pipe {
  base::UniqueFd reader;
  base::UniqueFd writer;

  static Pipe make();
};

/// Makes reads and writes return at once.
void set_nonblocking(const base::UniqueFd& fd);

}  // namespace syncbn::launch
