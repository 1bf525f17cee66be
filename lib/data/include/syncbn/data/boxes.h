#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <syncbn/data/image.h>
#include <syncbn/data/sample_dataset.h>
#include <syncbn/data/transforms.h>

namespace syncbn::data {

/// An object in an image, as in COCO's instances files. Lengths are in pixels of the image before
/// the transforms.
struct Annotation {
  int64_t label = 0;  ///< below num_classes()
  double x = 0;       ///< of the left side
  double y = 0;       ///< of the upper side
  double width = 0;   ///< may be 0, like height
  double height = 0;
  double area = 0;        ///< of the object's mask if the file states it, otherwise of the box
  bool is_crowd = false;  ///< the box is around many objects
  int64_t id = 0;         ///< in the file; the position in its list if it has none
};

/// Whether a box belongs to the target, as in torchvision's references.
inline bool is_target(const Annotation& box) {
  return !box.is_crowd && box.width > 0 && box.height > 0;
}

/// Images with boxes around objects. The target of a sample has the layout of BoxTarget.
class BoxDataset : public SampleDataset {
 public:
  /// All annotations of an image, including crowds and boxes without area.
  virtual std::span<const Annotation> annotations(int64_t index) const = 0;
  virtual int64_t image_id(int64_t index) const = 0;
  /// The id of a class in the training split's annotation file, by label; the highest if there are
  /// several.
  virtual int64_t category_id(int64_t label) const = 0;
  /// The image's size before the transforms.
  virtual ImageSize original_size(int64_t index) const = 0;

  /// The set that this one is a subset() of, or itself. BoxTarget::kIndex is an index into it.
  virtual const BoxDataset& whole() const { return *this; }
};

/// BoxDataset::category_id() of all classes, by label; empty if the data has no boxes.
std::vector<int64_t> category_ids(const Dataset& dataset);

/// The layout of a target, [1 + M, kColumns], where M is the largest number of boxes of a sample.
/// Values are float64 in the memory of an int64 tensor, so that all kinds of targets have one type:
/// BoxTarget::decode() gives the values. Row 0 describes the sample. The other rows are boxes;
/// unused rows come last.
///
/// Crowds are left out, as are boxes that are less than a pixel wide or high after the transforms
/// (torchvision's SanitizeBoundingBoxes).
struct BoxTarget {
  static constexpr int64_t kColumns = 5;

  // Columns of row 0.
  static constexpr int64_t kIndex = 0;           ///< of the sample in BoxDataset::whole()
  static constexpr int64_t kOriginalHeight = 1;  ///< in pixels, before the transforms
  static constexpr int64_t kOriginalWidth = 2;
  static constexpr int64_t kHeight = 3;  ///< in pixels, after the transforms
  static constexpr int64_t kWidth = 4;

  // Columns of the other rows. Corners are in pixels of the transformed image.
  static constexpr int64_t kLabel = 0;  ///< kUnused: the row has no box
  static constexpr int64_t kX1 = 1;
  static constexpr int64_t kY1 = 2;
  static constexpr int64_t kX2 = 3;
  static constexpr int64_t kY2 = 4;

  static constexpr double kUnused = -1;

  /// Writes a target.
  /// @param target of shape [1 + M, kColumns]
  /// @param sample after the transforms
  static void encode(std::span<int64_t> target, int64_t index, ImageSize original,
                     const ImageSample& sample);

  /// float64 [..., kColumns], the same memory.
  static at::Tensor decode(const at::Tensor& target) { return target.view(at::kDouble); }
};

}  // namespace syncbn::data
