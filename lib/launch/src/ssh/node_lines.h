#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

namespace syncbn::launch {

/// Splits the stderr of a node's launcher into messages to the head, each after the job's mark at
/// the end of a line, and lines of workers. Long lines are cut as LineSplitter cuts them. A message
/// with a report may be longer, up to kLongestMessage; anything above that is cut, and then is not
/// JSON.
class NodeLines {
 public:
  static constexpr size_t kLongestMessage = 64 << 20;
  struct Sinks {
    std::function<void(std::string_view line)> line;  ///< without its newline
    std::function<void(std::string_view message)> message;
  };

  explicit NodeLines(std::string mark);

  void feed(std::string_view bytes, const Sinks& to);
  /// Passes on a last line without a newline. Drops an incomplete message.
  void finish(const Sinks& to);

 private:
  void end_line(const Sinks& to);
  void cut(const Sinks& to);

  std::string mark_;
  std::string line_;  ///< so far
};

}  // namespace syncbn::launch
