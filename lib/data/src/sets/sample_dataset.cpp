#include <syncbn/data/sample_dataset.h>

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include "sets/gather.h"

namespace syncbn::data {
namespace {

std::vector<int64_t> with_batch(int64_t size, std::vector<int64_t> shape) {
  shape.insert(shape.begin(), size);
  return shape;
}

}  // namespace

std::string SampleDataset::name_of(int64_t index) const {
  return fmt::format("sample {}", index);
}

Batch SampleDataset::get_batch(std::span<const int64_t> indices) const {
  check_indices(indices, size());
  Batch batch = allocate(std::ssize(indices));
  for (int64_t place = 0; place < std::ssize(indices); ++place) {
    const int64_t index = indices[static_cast<size_t>(place)];
    SampleRandom random(0, 0, index);
    read_sample(index, random, slot_of(batch, place));
  }
  return batch;
}

Batch SampleDataset::allocate(int64_t size, bool pin_memory) const {
  const auto options = at::TensorOptions().pinned_memory(pin_memory);
  return {at::empty(with_batch(size, sample_shape()), options.dtype(at::kByte)),
          at::empty(with_batch(size, target_shape()), options.dtype(at::kLong))};
}

SampleSlot SampleDataset::slot_of(const Batch& batch, int64_t place) {
  const int64_t count = batch.size();
  const int64_t values = batch.data.numel() / count;
  const int64_t labels = batch.target.numel() / count;
  return {{batch.data.mutable_data_ptr<uint8_t>() + place * values, static_cast<size_t>(values)},
          {batch.target.mutable_data_ptr<int64_t>() + place * labels, static_cast<size_t>(labels)}};
}

}  // namespace syncbn::data
