#pragma once

#include <syncbn/base/unique_fd.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace syncbn::dist::detail {

/// What ranks tell each other outside of collectives. On the wire a line: fields between tabs.
struct Message {
  static constexpr int kAll = -1;

  int from = 0;
  int to = kAll;
  std::string type;
  std::vector<std::string> fields;

  std::string line() const;
  /// Nothing for a line that is none of ours.
  static std::optional<Message> parse(const std::string& line);
  /// The empty string where there is none.
  std::string field(size_t index) const;
  /// 0 where there is none.
  uint64_t number(size_t index) const;
};

/// One end of a connection between rank 0 and another rank. Never blocks. Move-only.
class WatchLink {
 public:
  /// @param fd a connected socket.
  explicit WatchLink(base::UniqueFd fd, int peer = -1, std::string where = "");

  /// The rank at the other end; -1 before it has said so.
  int peer;
  /// "host, process 7": of the peer.
  std::string where;
  std::chrono::steady_clock::time_point since = std::chrono::steady_clock::now();

  int fd() const { return fd_.get(); }
  bool is_open() const { return static_cast<bool>(fd_); }
  bool has_output() const { return !output_.empty(); }
  /// Sends as much as the connection takes; flush() has to send the rest.
  void send(const std::string& line);
  void flush();
  /// Adds the lines that have come, at most some hundred KB. False once the connection has ended,
  /// or when the first line of a process that may be a stranger does not end.
  bool receive(std::vector<std::string>& lines);
  void close() { fd_.reset(); }

 private:
  void take_lines(size_t searched, std::vector<std::string>& lines);

  base::UniqueFd fd_;
  std::string input_;
  std::string output_;
};

}  // namespace syncbn::dist::detail
