#pragma once

#include <poll.h>
#include <syncbn/base/byte_queue.h>
#include <syncbn/base/unique_fd.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace syncbn::base {

/// One end of a connection (a connected stream socket or a pipe) with a buffer for each direction.
/// No call blocks: the owner polls fd() for events(), then calls receive() and flush().
///
/// The caller does the framing: next_line() takes messages that end with a newline; for other
/// protocols, read input() and consume() what you have read. Move-only, not thread-safe.
class Channel {
 public:
  /// Default of max_unsent: a peer with this many unread bytes has stopped reading.
  static constexpr size_t kMaxUnsent = size_t{64} << 20;

  Channel() = default;
  /// Makes `fd` non-blocking and switches Nagle's algorithm off.
  /// @param max_unsent the channel fails with ENOBUFS if more bytes than this are unsent.
  explicit Channel(UniqueFd fd, size_t max_unsent = kMaxUnsent);

  int fd() const { return fd_.get(); }
  /// POLLIN, and POLLOUT while bytes are unsent. EPOLLIN and EPOLLOUT have the same values.
  short events() const { return unsent() > 0 ? POLLIN | POLLOUT : POLLIN; }
  bool is_open() const { return static_cast<bool>(fd_); }
  void close() { fd_.reset(); }

  /// Appends to the send buffer. Drops the bytes if the channel is closed or has ended.
  void queue(std::string_view bytes);
  /// Sends as much as the peer takes now.
  void flush();
  void send(std::string_view bytes) {
    queue(bytes);
    flush();
  }
  size_t unsent() const { return output_.size(); }

  /// Default of receive()'s limit: one busy peer must not starve the others.
  static constexpr size_t kMaxAtOnce = size_t{256} << 10;
  /// Appends what has arrived to the input, `max` bytes at most: poll() reports the rest again.
  void receive(size_t max = kMaxAtOnce);
  std::string_view input() const { return input_.view(); }
  void consume(size_t bytes) { input_.consume(bytes); }
  /// The next line of the input, without its newline; std::nullopt if it is incomplete.
  /// @param max_size the channel fails with EMSGSIZE if an incomplete line is longer.
  std::optional<std::string> next_line(size_t max_size = SIZE_MAX);

  /// Ends the channel from this side, with an errno as the reason. Drops the input and all unsent
  /// bytes.
  void fail(int error);
  /// Whether the peer has closed the connection, or the connection has failed. Input that arrived
  /// before stays, except after fail().
  bool has_ended() const { return ended_; }
  /// The errno with which it failed; 0 if the peer closed it.
  int error() const { return error_; }

 private:
  void break_output(int error);

  UniqueFd fd_;
  size_t max_unsent_ = kMaxUnsent;
  ByteQueue input_;
  ByteQueue output_;
  bool cannot_send_ = false;
  bool ended_ = false;
  int error_ = 0;
};

}  // namespace syncbn::base
