#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <syncbn/data/dataset.h>
#include <syncbn/data/random.h>

namespace syncbn::data {

/// Where one sample of a batch is written: memory of the loader's.
struct SampleSlot {
  std::span<uint8_t> data;    ///< as many values as sample_shape() has, row-major
  std::span<int64_t> target;  ///< as many as target_shape() has: one for a class label
};

/// A data set whose samples are made one at a time, such as image files that are decoded. Batches
/// are uint8, [B, ...sample_shape]; they become float on the training device (normalize()).
///
/// One's own is a class with size(), labels(), num_classes(), sample_shape(), fingerprint() and:
///
///     void read_sample(int64_t index, SampleRandom& random, const SampleSlot& slot) const override
///     {
///       decode(files_[index], slot.data);
///       slot.target[0] = labels_[index];
///     }
class SampleDataset : public Dataset {
 public:
  /// Makes one sample. Called from many threads at once. `random` is the only source of chance, so
  /// that a sample is the same whoever makes it.
  /// @throws base::UserError naming file and reason when the sample is damaged.
  virtual void read_sample(int64_t index, SampleRandom& random, const SampleSlot& slot) const = 0;

  /// Asks storage for samples that are read soon, without waiting for it. Called from many threads
  /// at once, where the sampler has a storage_order().
  virtual void prefetch([[maybe_unused]] std::span<const int64_t> indices) const {}

  /// Of one target: {} for a class label, {height, width} for the labels of pixels.
  virtual std::vector<int64_t> target_shape() const { return {}; }

  /// The sample's file or place, for messages.
  virtual std::string name_of(int64_t index) const;

  /// One after the other in this thread, as in epoch 0 of seed 0. Loader has threads for it.
  Batch get_batch(std::span<const int64_t> indices) const override;

  /// A batch of `size` samples whose memory is there and not yet written.
  Batch allocate(int64_t size, bool pin_memory = false) const;

  /// Where sample `place` of such a batch lies.
  static SampleSlot slot_of(const Batch& batch, int64_t place);
};

}  // namespace syncbn::data
