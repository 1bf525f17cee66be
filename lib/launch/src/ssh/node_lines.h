#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

namespace syncbn::launch {

/// Tells apart what comes from the stderr of a node's launcher: its messages to the head, each
/// behind the job's mark at the end of a line, and its workers' lines. Lines are cut as by a
/// LineSplitter. A message is longer than any of them where it holds a report; one longer than
/// kLongestMessage, which no launcher sends, is cut, and is no JSON then.
class NodeLines {
 public:
  static constexpr size_t kLongestMessage = 64 << 20;
  struct Sinks {
    std::function<void(std::string_view line)> line;  ///< without its newline
    std::function<void(std::string_view message)> message;
  };

  explicit NodeLines(std::string mark);

  void feed(std::string_view bytes, const Sinks& to);
  /// The last line, when it had no newline. Half a message is none.
  void finish(const Sinks& to);

 private:
  void end_line(const Sinks& to);
  void cut(const Sinks& to);

  std::string mark_;
  std::string line_;  ///< so far
};

}  // namespace syncbn::launch
