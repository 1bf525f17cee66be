#pragma once

#include <bitset>
#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <syncbn/data/dataset.h>
#include <syncbn/data/random.h>

namespace syncbn::data {

/// The memory of one sample in a batch, row-major.
struct SampleSlot {
  std::span<uint8_t> data;    ///< of shape sample_shape()
  std::span<int64_t> target;  ///< of shape target_shape(): one value for a class label
  /// If sizes_vary(): read_sample() sets this to the image's height and width, and writes the image
  /// to the upper left corner of `data` and labels of pixels to that of `target`.
  std::span<int64_t> size = {};
};

/// What a sample's files hold that its pixels in a batch do not show.
struct SampleFacts {
  int orientation = 1;  ///< EXIF, 1 to 8; 1 if the option exif_orientation would change nothing
  /// The largest value after values of 16 bits were scaled to 8; nothing if they were not.
  std::optional<int> largest_scaled = {};
  /// Which labels the pixels have, ignore_index() included; nothing if pixels have no labels.
  std::optional<std::bitset<256>> labels = {};
};

/// A data set whose samples are made one at a time, for example by decoding image files. Batches
/// are uint8, [B, ...sample_shape]; normalize() turns them into float on the training device.
///
/// A custom data set implements size(), labels(), num_classes(), sample_shape(), fingerprint() and:
///
///     void read_sample(int64_t index, SampleRandom& random, const SampleSlot& slot) const override
///     {
///       decode(files_[index], slot.data);
///       slot.target[0] = labels_[index];
///     }
class SampleDataset : public Dataset {
 public:
  /// Makes one sample. Called from many threads at once. All randomness must come from `random`, so
  /// that the sample does not depend on the thread.
  /// @throws base::UserError naming file and reason if the sample is damaged.
  virtual void read_sample(int64_t index, SampleRandom& random, const SampleSlot& slot) const = 0;

  /// Asks storage for samples that will be read soon, without waiting. If the sampler has a
  /// storage_order(), this is called from many threads at once.
  virtual void prefetch(std::span<const int64_t> /*indices*/) const {}

  /// {} for a class label, {height, width} for the labels of pixels, another shape for boxes.
  virtual std::vector<int64_t> target_shape() const { return {}; }

  /// With labels of pixels: the label of ignored pixels.
  virtual int64_t ignore_index() const { return 255; }

  /// Looks into the sample's files: images' headers, whole masks and whole images of 16 bits.
  /// @throws base::UserError naming file and reason if one is damaged.
  virtual SampleFacts facts(int64_t /*index*/) const { return {}; }

  /// The sample's file or position, for messages.
  virtual std::string name_of(int64_t index) const;

  /// Makes the samples in this thread, with the random numbers of seed 0 and epoch 0. Loader uses
  /// several threads instead.
  Batch get_batch(std::span<const int64_t> indices) const override;

  /// Uninitialised memory for a batch.
  Batch allocate(int64_t size, bool pin_memory = false) const;

  /// The memory of sample `place` of a batch from allocate().
  static SampleSlot slot_of(const Batch& batch, int64_t place);

  /// Turns a batch from allocate(), with its samples made, into what the loader returns. If
  /// sizes_vary(), the result is as large as its largest image, with sides rounded up to a multiple
  /// of 32 (torchvision's GeneralizedRCNNTransform) but not beyond sample_shape(). Pixels outside
  /// of an image are 0, their labels ignore_index().
  Batch trimmed(const Batch& batch) const;
};

/// Whether a data set has labels of pixels.
bool labels_pixels(const Dataset& dataset);

/// Looks for what is no error and yet often a mistake: images that are stored rotated or have
/// values of 16 bits that are scaled, and classes that no sample, box to learn from, or pixel has.
/// Looks into files, spread evenly over the data set, until it has seen all or the time is up.
/// @param name what each line begins with; empty: the split's name
/// @return a line about each finding, which says how many files it is about
std::vector<std::string> survey(const Dataset& dataset, Split split,
                                std::chrono::milliseconds limit, const std::string& name = "");

}  // namespace syncbn::data
