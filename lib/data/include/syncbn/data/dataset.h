#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <syncbn/config/schema.h>
#include <syncbn/data/random.h>

namespace syncbn::data {

/// The part of a data set.
enum class Split {
  kTrain,
  kVal,   ///< for choosing the best checkpoint
  kTest,  ///< for the final report
  /// The training samples with the transforms for evaluation, for hold_out().
  kHeldOut,
};

/// "train", "val", "test" or "held-out".
std::string to_string(Split split);

/// Samples and their targets, in the same order along the first dimension.
struct Batch {
  at::Tensor data;    ///< [B, ...sample_shape] on the CPU: float32, or uint8 for normalize()
  at::Tensor target;  ///< int64: [B] class labels, [B, H, W] labels of pixels, or BoxDataset's
  /// int64 [B, 2]: height and width of each image, which is in the upper left corner of its part of
  /// `data`; undefined if all images fill the batch.
  at::Tensor sizes = {};
  // One per sample, if a Loader made the batch:
  std::vector<int64_t> indices = {};  ///< in the data set
  /// Random numbers for later steps, independent of those that the transforms used; also a function
  /// of (seed, epoch, sample).
  std::vector<SampleRandom> randoms = {};

  int64_t size() const { return data.defined() ? data.size(0) : 0; }
};

/// One value per channel, for pixels in [0, 1].
struct Normalization {
  std::vector<double> mean;
  std::vector<double> std;

  /// ImageNet's, from torchvision's reference training.
  static Normalization imagenet() { return {{0.485, 0.456, 0.406}, {0.229, 0.224, 0.225}}; }
};

/// Why a file cannot be read, in UnreadableFiles.
inline constexpr const char* kEmptyFile = "empty";
inline constexpr const char* kMissingFile = "missing";
inline constexpr const char* kOtherContent = "";  ///< neither JPEG nor PNG

/// Names of files whose samples cannot be read, each with its reason: empty, missing, or neither
/// JPEG nor PNG (the constants above).
using UnreadableFiles = std::map<std::string, std::string>;

/// What a user should know of a data set before a run.
struct Remark {
  std::string text;  ///< names the files
  /// Parts of the data cannot be used. A run begins nevertheless only with loader.on_error: skip.
  bool is_fault = false;
  UnreadableFiles unreadable = {};  ///< all of them, if the remark is about such files
};

/// A finite set of samples with the indices 0 to size() - 1.
///
/// Immutable: const members may be called from any thread. The pixels of a sample do not depend on
/// the order of calls or the number of ranks.
class Dataset {
 public:
  virtual ~Dataset() = default;

  virtual int64_t size() const = 0;

  /// These samples in this order; indices may repeat.
  /// @throws base::InternalError for an index outside [0, size()).
  virtual Batch get_batch(std::span<const int64_t> indices) const = 0;

  /// The class of each sample; empty if it is known only after reading the sample.
  virtual std::span<const int64_t> labels() const = 0;

  virtual int64_t num_classes() const = 0;

  /// By label; empty if the classes have no names.
  virtual std::vector<std::string> class_names() const { return {}; }

  /// For samples stored sequentially in a few large files: the index after each file's last sample.
  /// Otherwise empty.
  virtual std::span<const int64_t> shard_ends() const { return {}; }

  virtual std::vector<Remark> remarks() const { return {}; }

  /// {channels, height, width} for images, the largest possible if sizes_vary(). Others: any shape.
  virtual std::vector<int64_t> sample_shape() const = 0;

  /// Whether images have different sizes, so that batches have Batch::sizes. Evaluation then uses
  /// batches of one image: results do not depend on the images that share a batch.
  virtual bool sizes_vary() const { return false; }

  /// The argument of normalize() for batches of uint8; by default mean 0 and std 1.
  virtual Normalization normalization() const;

  /// A hash of the content, the same on every machine. A resumed run compares it to detect other
  /// data.
  virtual uint64_t fingerprint() const = 0;
};

/// The registry behind `data: {type: digits}`. Register a custom data set before the configuration
/// is read:
///
///     data::DatasetKind::registry().add<MyOptions>("mine", "what it is",
///         [](const MyOptions& options, data::Split split) {
///           if (split == data::Split::kVal) return std::shared_ptr<const MyDataset>();
///           return std::make_shared<const MyDataset>(options, split); });
///
/// Built in are digits, synthetic (random images with a learnable class signal, for benchmarks),
/// and the sets of <syncbn/data/image_sets.h>. make() reads the data; it throws base::UserError
/// naming a file that cannot be read. It returns null for a split that the data does not have; most
/// sets have no Split::kVal. Split::kHeldOut is as long as Split::kTrain, or null.
struct DatasetKind {
  using Registry = config::Registry<std::shared_ptr<const Dataset>, Split>;
  static Registry& registry();
};

}  // namespace syncbn::data
