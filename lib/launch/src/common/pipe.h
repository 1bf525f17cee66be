#pragma once

#include <syncbn/base/unique_fd.h>

#include <array>
#include <functional>
#include <string_view>

namespace syncbn::launch {

/// Both ends are closed on exec. @throws base::UnavailableError where there is no room for more.
struct Pipe {
  base::UniqueFd reader;
  base::UniqueFd writer;

  static Pipe make();
};

/// Makes reads and writes return at once.
void set_nonblocking(const base::UniqueFd& fd);

using ReadBuffer = std::array<char, 65536>;
/// What can be read at once, in `buffer`; empty where that is nothing. At its end the pipe is
/// closed.
std::string_view read_some(base::UniqueFd& fd, ReadBuffer& buffer);

/// Calls `read_once` until it has read nothing. Bounded: a grandchild may hold the pipe, and write
/// for ever.
void read_until_empty(const std::function<bool()>& read_once);

}  // namespace syncbn::launch
