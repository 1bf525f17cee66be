#pragma once

#include <fmt/format.h>
#include <syncbn/data/sample_dataset.h>

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace syncbn::test {

/// Sample i has random bytes and the label i. `before` runs first, on the thread that reads the
/// sample.
class Noise : public data::SampleDataset {
 public:
  explicit Noise(
      int64_t size, std::function<void(int64_t)> before = [](int64_t) {})
      : size_(size), before_(std::move(before)) {}

  int64_t size() const override { return size_; }
  std::span<const int64_t> labels() const override { return {}; }
  int64_t num_classes() const override { return size_; }
  std::vector<int64_t> sample_shape() const override { return {3, 4, 5}; }
  uint64_t fingerprint() const override { return 1; }
  std::string name_of(int64_t index) const override { return fmt::format("file-{}", index); }
  void read_sample(int64_t index, data::SampleRandom& random,
                   const data::SampleSlot& slot) const override {
    before_(index);
    for (uint8_t& value : slot.data) value = static_cast<uint8_t>(random.bits());
    slot.target[0] = index;
  }

 private:
  int64_t size_;
  std::function<void(int64_t)> before_;
};

inline std::vector<int64_t> labels_of(const data::Batch& batch) {
  const auto* first = batch.target.const_data_ptr<int64_t>();
  return {first, first + batch.target.numel()};
}

}  // namespace syncbn::test
