#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

// at::Tensor: what batches are made of.
#include <ATen/core/Tensor.h>

#include <syncbn/config/schema.h>

namespace syncbn::data {

/// Which part of a data set: what is trained on, or what is held out for evaluation.
enum class Split { kTrain, kTest };

/// "train" or "test".
std::string to_string(Split split);

/// Samples and their targets, in the same order along the first dimension.
struct Batch {
  at::Tensor data;  ///< [B, ...sample_shape], float32, or uint8 that awaits normalize(); on the CPU
  at::Tensor target;  ///< [B], int64: class labels; [B, H, W]: labels of pixels

  int64_t size() const { return data.defined() ? data.size(0) : 0; }
};

/// Per channel, of values in [0, 1].
struct Normalization {
  std::vector<double> mean;
  std::vector<double> std;

  /// ImageNet's, as torchvision's reference training has them.
  static Normalization imagenet() { return {{0.485, 0.456, 0.406}, {0.229, 0.224, 0.225}}; }
};

/// A finite set of samples that are reached by their number in [0, size()).
///
/// Immutable once made: every const member may be called from any thread. A sample is the same
/// pixels every time, whatever the order or the number of ranks.
class Dataset {
 public:
  virtual ~Dataset() = default;

  virtual int64_t size() const = 0;

  /// The samples with these numbers, in this order; numbers may repeat.
  /// @throws base::InternalError for a number outside [0, size()).
  virtual Batch get_batch(std::span<const int64_t> indices) const = 0;

  /// Every sample's class, or empty where they are not known before a sample is read.
  virtual std::span<const int64_t> labels() const = 0;

  virtual int64_t num_classes() const = 0;

  /// Where samples lie one behind the other in a few large files: of each file, the number of the
  /// first sample behind its own. Otherwise empty.
  virtual std::span<const int64_t> shard_ends() const { return {}; }

  /// Shape of one sample: {channels, height, width} for images.
  virtual std::vector<int64_t> sample_shape() const = 0;

  /// What normalize() takes for batches of uint8; they are divided by 255 alone by default.
  virtual Normalization normalization() const;

  /// A hash of the content, the same on every machine. A resumed run refuses other data by it.
  virtual uint64_t fingerprint() const = 0;
};

/// The registry behind `data: {type: digits}` and, with a line of registration, one's own:
///
///     data::DatasetKind::registry().add<MyOptions>("mine", "what it is",
///         [](const MyOptions& options, data::Split split) {
///           return std::make_shared<const MyDataset>(options, split); });
///
/// Knows:
///   digits     UCI's handwritten digits, 1 x 8 x 8, ten classes, shipped with this project
///   synthetic  random images of any size with a learnable class signal; for benchmarks
///   mnist, cifar10, cifar100, csv_images, image_folder, segmentation_folder, tar_shards
///              see <syncbn/data/image_sets.h>
/// make() reads the data; it throws base::UserError naming the file when that cannot be done.
struct DatasetKind {
  using Registry = config::Registry<std::shared_ptr<const Dataset>, Split>;
  static Registry& registry();
};

}  // namespace syncbn::data
