#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace syncbn::launch {

/// Bytes that wait to be written. Memory stays proportional to them even if the buffer never runs
/// empty; the front is erased in large pieces to keep take() cheap.
class SendBuffer {
 public:
  void append(std::string_view bytes) { bytes_.append(bytes); }
  std::string_view view() const { return std::string_view(bytes_).substr(taken_); }
  size_t size() const { return bytes_.size() - taken_; }
  bool empty() const { return size() == 0; }

  /// Removes the first `count` bytes.
  void take(size_t count) {
    taken_ += count;
    if (taken_ == bytes_.size()) return clear();
    if (taken_ < kPiece || taken_ < bytes_.size() / 2) return;
    bytes_.erase(0, taken_);
    taken_ = 0;
  }
  void clear() {
    bytes_ = {};
    taken_ = 0;
  }

  /// For appending in place.
  std::string& bytes() { return bytes_; }

 private:
  static constexpr size_t kPiece = 64 << 10;
  std::string bytes_;
  size_t taken_ = 0;
};

}  // namespace syncbn::launch
