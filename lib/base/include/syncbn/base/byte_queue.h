#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace syncbn::base {

/// Bytes that are appended at the end and consumed from the front. The memory stays proportional to
/// the size, even if the queue never becomes empty.
class ByteQueue {
 public:
  void append(std::string_view bytes) { bytes_.append(bytes); }
  /// Valid until the next change.
  std::string_view view() const { return std::string_view(bytes_).substr(consumed_); }
  size_t size() const { return bytes_.size() - consumed_; }
  bool empty() const { return size() == 0; }
  size_t capacity() const { return bytes_.capacity(); }

  /// @param count at most size().
  void consume(size_t count) {
    consumed_ += count;
    searched_ = 0;
    if (consumed_ == bytes_.size()) return clear();
    // Moving the rest to the front each time would make consuming small pieces quadratic.
    if (consumed_ < kPiece || consumed_ < bytes_.size() / 2) return;
    bytes_.erase(0, consumed_);
    consumed_ = 0;
  }
  void clear() { *this = {}; }

  /// Takes the next line, without its '\n'. Empty until there is a whole one.
  std::optional<std::string> next_line() {
    const size_t end = view().find('\n', searched_);
    if (end == std::string_view::npos) {
      searched_ = size();
      return std::nullopt;
    }
    std::string line(view().substr(0, end));
    consume(end + 1);
    return line;
  }

 private:
  static constexpr size_t kPiece = 64 << 10;
  std::string bytes_;
  size_t consumed_ = 0;
  size_t searched_ = 0;  // of view(), for next_line()
};

}  // namespace syncbn::base
