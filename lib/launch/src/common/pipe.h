#pragma once

#include <syncbn/base/unique_fd.h>

#include <array>
#include <functional>
#include <string_view>

namespace syncbn::launch {

/// Both ends are closed on exec.
struct Pipe {
  base::UniqueFd reader;
  base::UniqueFd writer;

  /// @throws base::UnavailableError if no descriptors are left.
  static Pipe make();
};

void set_nonblocking(const base::UniqueFd& fd);

using ReadBuffer = std::array<char, 65536>;
/// Reads from a non-blocking pipe into `buffer` and returns what it read, perhaps nothing. Closes
/// `fd` at the end of the stream.
std::string_view read_some(base::UniqueFd& fd, ReadBuffer& buffer);

/// Calls `read_once` until it returns false, but at most 64 times: a grandchild that holds the pipe
/// may never stop writing.
void read_until_empty(const std::function<bool()>& read_once);

}  // namespace syncbn::launch
