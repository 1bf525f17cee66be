#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace syncbn::test {

/// Compares bits, so equal NaNs compare equal.
template <class T>
bool same_bits(const T& a, const T& b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}

/// Values that begin `offset` elements after a vector's alignment, with guards around them.
template <class T>
class Guarded {
 public:
  Guarded(int64_t count, size_t offset) : all_(static_cast<size_t>(count) + 3 * kGuard, T(77)) {
    const size_t misaligned = reinterpret_cast<uintptr_t>(all_.data()) % 64 / sizeof(T);
    begin_ = kGuard + (kGuard - misaligned) % (64 / sizeof(T)) + offset;
    end_ = begin_ + static_cast<size_t>(count);
  }
  T* data() { return all_.data() + begin_; }
  void expect_guards() const {
    for (size_t i = 0; i < all_.size(); ++i) {
      if (i >= begin_ && i < end_) continue;
      ASSERT_TRUE(same_bits(all_[i], T(77)))
          << i << ", values are from " << begin_ << " to " << end_;
    }
  }

 private:
  static constexpr size_t kGuard = 64;

  std::vector<T> all_;
  size_t begin_, end_;
};

}  // namespace syncbn::test
