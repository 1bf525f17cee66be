#pragma once

#include <syncbn/base/byte_queue.h>
#include <syncbn/base/unique_fd.h>
#include <sys/types.h>

#include <cstddef>
#include <optional>
#include <string_view>

namespace syncbn::launch {

/// Our own stdout or stderr. Writes never wait for the reader: what the reader (`less`, a terminal
/// after Ctrl-S) does not take yet is kept, in order.
///
/// Does not set O_NONBLOCK on the descriptor, which is shared with the shell and other programs:
/// pipes and terminals are opened a second time.
class StandardStream {
 public:
  explicit StandardStream(int fd);

  void write(std::string_view text);
  /// Writes as much of the kept text as the reader takes.
  void flush();

  /// Bytes that the reader has not taken yet.
  size_t pending() const { return pending_.size(); }
  /// What to poll for POLLOUT while text is pending.
  int fd() const { return own_ ? own_.get() : fd_; }
  /// errno of the first write that failed; all text after it is dropped. A reader that has ended
  /// (EPIPE, as with `| head`) or a terminal that was closed (EIO) is not an error.
  std::optional<int> error() const { return error_; }

 private:
  /// The number of bytes written; empty if the reader takes none now.
  std::optional<size_t> write_some(std::string_view text);

  int fd_;
  base::UniqueFd own_;
  mode_t type_ = 0;  ///< S_IFMT's part of st_mode
  bool closed_ = false;
  std::optional<int> error_;
  base::ByteQueue pending_;
};

}  // namespace syncbn::launch
