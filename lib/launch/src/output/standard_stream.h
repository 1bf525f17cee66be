#pragma once

#include <syncbn/base/byte_queue.h>
#include <syncbn/base/unique_fd.h>

#include <cstddef>
#include <optional>
#include <string_view>

namespace syncbn::launch {

/// Our own stdout or stderr, written without ever waiting for its reader: what the reader (`less`,
/// a terminal after Ctrl-S) does not take yet is kept, in order.
///
/// The descriptor's O_NONBLOCK is left alone, since the shell and other programs share it: pipes
/// and terminals are opened a second time.
class StandardStream {
 public:
  explicit StandardStream(int fd);

  void write(std::string_view text);
  /// Writes what is kept, as far as it goes.
  void flush();

  /// Bytes that the reader has not taken yet.
  size_t pending() const { return pending_.size(); }
  /// For poll(POLLOUT) while something is pending.
  int fd() const { return own_ ? own_.get() : fd_; }
  /// errno of the first write that failed; all text is dropped from then on. A reader that has seen
  /// enough (EPIPE, as `| head`) is no error, nor is a terminal that has been hung up (EIO).
  std::optional<int> error() const { return error_; }

 private:
  /// Bytes written; nothing: not now.
  std::optional<size_t> write_some(std::string_view text);

  int fd_;
  base::UniqueFd own_;
  bool is_socket_ = false;
  bool is_file_ = false;
  bool is_device_ = false;
  bool closed_ = false;
  std::optional<int> error_;
  base::ByteQueue pending_;
};

}  // namespace syncbn::launch
