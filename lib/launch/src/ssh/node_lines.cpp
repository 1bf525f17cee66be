#include "ssh/node_lines.h"

#include <algorithm>
#include <utility>

#include "output/output.h"

namespace syncbn::launch {

NodeLines::NodeLines(std::string mark) : mark_(std::move(mark)) {}

void NodeLines::feed(std::string_view bytes, const Sinks& to) {
  for (size_t end = 0; (end = bytes.find('\n')) != std::string_view::npos;) {
    line_.append(bytes.substr(0, end));
    end_line(to);
    bytes.remove_prefix(end + 1);
  }
  line_.append(bytes);
  cut(to);
}

void NodeLines::finish(const Sinks& to) {
  line_.resize(std::min(line_.find(mark_), line_.size()));
  if (!line_.empty()) to.line(line_);
  line_.clear();
}

void NodeLines::end_line(const Sinks& to) {
  const std::string_view line = line_;
  const size_t mark = line.find(mark_);
  const bool has_message = mark != std::string_view::npos;
  // A worker may have written a line without a newline before the message.
  if (!has_message || mark > 0) to.line(line.substr(0, mark));
  if (has_message) to.message(line.substr(mark + mark_.size()));
  line_.clear();
}

void NodeLines::cut(const Sinks& to) {
  if (line_.size() <= LineSplitter::kLongest) return;
  const size_t mark = line_.find(mark_);
  if (mark == std::string::npos) {
    // The last bytes may be the start of a mark.
    const size_t size = line_.size() - mark_.size() + 1;
    to.line(std::string_view(line_).substr(0, size));
    line_.erase(0, size);
  } else if (line_.size() > mark + kLongestMessage) {
    end_line(to);
  }
}

}  // namespace syncbn::launch
