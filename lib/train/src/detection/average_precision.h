#pragma once

// Average precision of boxes as COCO defines it: the figures of pycocotools' COCOeval with iouType
// "bbox" and its default parameters, which are the reference for every rule and number here.
//
// It has two parts, so that ranks can share the work: match() compares the detections of one image
// with its truths, and average_precision() computes the figures from the matches of all images. The
// functions have no state: any thread may call them.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace syncbn::train {

/// In pixels.
struct PixelBox {
  double x = 0, y = 0;  ///< upper left corner
  double width = 0, height = 0;
};

/// An object in an image.
struct Truth {
  int64_t label = 0;
  PixelBox box;
  double area = 0;        ///< square pixels of the object, which may fill only a part of its box
  bool is_crowd = false;  ///< a group: detections that match it count neither as right nor wrong
};

struct Detection {
  int64_t label = 0;
  double score = 0;
  PixelBox box;
};

/// Ranges of area for which truths count separately: all, small, medium, large.
inline constexpr size_t kNumAreas = 4;
/// IoU from which a detection matches a truth: 0.5, 0.55, ..., 0.95.
inline constexpr size_t kNumThresholds = 10;
/// Recalls at which precision is sampled.
inline constexpr size_t kNumRecalls = 101;

/// A detection that was compared with the truths of its image. Bit `area * kNumThresholds +
/// threshold` of a mask stands for one range and one threshold.
struct MatchedDetection {
  int64_t label = 0;
  int64_t image_id = 0;
  int64_t place = 0;  ///< among the image's detections of the class, the best one first
  double score = 0;
  uint64_t matched = 0;  ///< bits
  uint64_t ignored = 0;  ///< bits: counts neither as right nor wrong
};

/// Compares the detections of an image with its truths. Only the best 100 of each class count; of
/// two with equal scores, the first is better.
std::vector<MatchedDetection> match(int64_t image_id, std::span<const Truth> truths,
                                    std::span<const Detection> detections);

/// Adds the number of an image's truths that are to be found to `counts`, [classes x kNumAreas].
void count_truths(std::span<const Truth> truths, std::span<int64_t> counts);

/// Names of AveragePrecision::summary. "map": mean over classes and thresholds, "map_50": with the
/// threshold 0.5, "mar_10": mean recall of the best 10 detections of each image and class.
inline constexpr std::array kSummaryNames = {"map",        "map_50",    "map_75",     "map_small",
                                             "map_medium", "map_large", "mar_1",      "mar_10",
                                             "mar_100",    "mar_small", "mar_medium", "mar_large"};

/// All in [0, 1]; NaN where there is no truth.
struct AveragePrecision {
  std::array<double, kSummaryNames.size()> summary;  ///< as COCOeval.summarize() prints them
  std::vector<double> classes;                       ///< by label: the class's value of "map"
};

/// @param matched of all images, in any order
/// @param counts the sum of count_truths() over all images
AveragePrecision average_precision(std::vector<MatchedDetection> matched,
                                   std::span<const int64_t> counts);

/// For each threshold, the precision at kNumRecalls recalls, 0, 0.01, ..., 1: means over the
/// classes that have truths, for the area range "all"; NaN if none has any. The mean of all is
/// "map".
using PrecisionCurves = std::array<std::array<double, kNumRecalls>, kNumThresholds>;

/// @param matched, counts as for average_precision()
PrecisionCurves precision_curves(std::vector<MatchedDetection> matched,
                                 std::span<const int64_t> counts);

}  // namespace syncbn::train
