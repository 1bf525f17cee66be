#include "detection/average_precision.h"

#include <algorithm>
#include <numeric>
#include <tuple>

#include "common/mean_of_present.h"

namespace syncbn::train {
namespace {

constexpr int64_t kMaxDetections = 100;  // per image and class
constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

struct AreaRange {
  double min, max;  ///< square pixels, both included

  bool contains(double area) const { return area >= min && area <= max; }
};
constexpr std::array<AreaRange, kNumAreas> kAreas = {
    {{0, 1e10}, {0, 32 * 32}, {32 * 32, 96 * 96}, {96 * 96, 1e10}}};

// numpy.linspace(0.5, 0.95, 10) and numpy.linspace(0, 1, 101), to the bit.
double threshold(size_t index) {
  return static_cast<double>(index) * ((0.95 - 0.5) / (kNumThresholds - 1)) + 0.5;
}
double recall_point(size_t index) {
  return static_cast<double>(index) * (1.0 / (kNumRecalls - 1));
}

uint64_t bit_of(size_t area, size_t threshold) {
  return uint64_t{1} << (area * kNumThresholds + threshold);
}

/// Intersection over union; for a crowd, over the detection's own area.
double iou(const PixelBox& found, const Truth& truth) {
  const PixelBox& box = truth.box;
  const double width =
      std::min(found.x + found.width, box.x + box.width) - std::max(found.x, box.x);
  const double height =
      std::min(found.y + found.height, box.y + box.height) - std::max(found.y, box.y);
  if (width <= 0 || height <= 0) return 0;
  const double common = width * height;
  const double area = found.width * found.height;
  return common / (truth.is_crowd ? area : area + box.width * box.height - common);
}

/// Matches the detections of one class in one image with its truths.
class ClassMatcher {
 public:
  /// @param found best first
  ClassMatcher(std::span<const Truth* const> truths, std::span<const Detection* const> found)
      : truths_(truths), found_(found), ignored_(truths.size()) {
    for (const Detection* one : found) {
      for (const Truth* truth : truths) ious_.push_back(iou(one->box, *truth));
    }
  }

  /// Adds the bits of an area range to `out`, in the order of `found`.
  void match(size_t area, std::span<MatchedDetection> out) {
    order_.clear();
    for (size_t i = 0; i < truths_.size(); ++i) {
      const bool counts = !truths_[i]->is_crowd && kAreas[area].contains(truths_[i]->area);
      ignored_[i] = counts ? 0 : 1;
      order_.push_back(i);
    }
    std::ranges::stable_sort(order_, {}, [&](size_t i) { return ignored_[i]; });
    for (size_t t = 0; t < kNumThresholds; ++t) {
      taken_.assign(truths_.size(), 0);
      const uint64_t bit = bit_of(area, t);
      for (size_t i = 0; i < found_.size(); ++i) {
        const size_t truth = best_match(i, threshold(t));
        if (truth != kUnmatched) {
          taken_[truth] = 1;
          out[i].matched |= bit;
          if (ignored_[truth] != 0) out[i].ignored |= bit;
        } else if (const PixelBox& box = found_[i]->box;
                   !kAreas[area].contains(box.width * box.height)) {
          out[i].ignored |= bit;
        }
      }
    }
  }

 private:
  static constexpr size_t kUnmatched = std::numeric_limits<size_t>::max();

  /// The free truth with the largest IoU; of several, the last. Takes an ignored one only if no
  /// other reaches the threshold. A crowd is always free.
  size_t best_match(size_t found, double threshold) const {
    double best = threshold;
    size_t match = kUnmatched;
    for (const size_t i : order_) {
      if (taken_[i] != 0 && !truths_[i]->is_crowd) continue;
      if (match != kUnmatched && ignored_[match] == 0 && ignored_[i] != 0) break;
      const double iou = ious_[found * truths_.size() + i];
      if (iou < best) continue;
      best = iou;
      match = i;
    }
    return match;
  }

  std::span<const Truth* const> truths_;
  std::span<const Detection* const> found_;
  std::vector<double> ious_;   ///< [found x truths]
  std::vector<char> ignored_;  ///< of the truths, in one range of area
  std::vector<char> taken_;    ///< of the truths, with one threshold
  std::vector<size_t> order_;  ///< of the truths: ignored ones last
};

template <class T>
std::vector<const T*> pointers_to(std::span<const T> items) {
  std::vector<const T*> all;
  for (const T& item : items) all.push_back(&item);
  return all;
}

/// The items with a label.
/// @param sorted by `label_of`
template <class T, class LabelOf>
std::span<const T> of_label(const std::vector<T>& sorted, int64_t label, LabelOf label_of) {
  return {std::ranges::lower_bound(sorted, label, {}, label_of),
          std::ranges::upper_bound(sorted, label, {}, label_of)};
}

/// One of the 12 figures: a mean over classes and thresholds.
struct Summary {
  bool is_recall = false;
  size_t area = 0;
  int64_t max_detections = kMaxDetections;  ///< per image and class
  size_t first_threshold = 0;
  size_t num_thresholds = kNumThresholds;
};

// In the order of kSummaryNames.
constexpr std::array<Summary, kSummaryNames.size()> kSummaries = {{
    {},
    {.num_thresholds = 1},
    {.first_threshold = 5, .num_thresholds = 1},
    {.area = 1},
    {.area = 2},
    {.area = 3},
    {.is_recall = true, .max_detections = 1},
    {.is_recall = true, .max_detections = 10},
    {.is_recall = true},
    {.is_recall = true, .area = 1},
    {.is_recall = true, .area = 2},
    {.is_recall = true, .area = 3},
}};

double recall(std::span<const MatchedDetection> found, uint64_t bit, int64_t max_detections,
              double truths) {
  const auto is_right = [&](const MatchedDetection& one) {
    return (one.matched & ~one.ignored & bit) != 0 && one.place < max_detections;
  };
  return static_cast<double>(std::ranges::count_if(found, is_right)) / truths;
}

void sort_by_label_and_score(std::vector<MatchedDetection>& matched) {
  // For equal scores, the image with the lower id comes first.
  std::ranges::sort(matched, {}, [](const MatchedDetection& one) {
    return std::tuple(one.label, -one.score, one.image_id, one.place);
  });
}

/// The precision at each recall_point(): the highest one at this or a higher recall, 0 above the
/// highest recall.
/// @param found by falling score
std::array<double, kNumRecalls> precisions_of(std::span<const MatchedDetection> found, uint64_t bit,
                                              double truths) {
  std::vector<double> recalls;
  std::vector<double> precisions;
  double right = 0;
  double wrong = 0;
  for (const MatchedDetection& one : found) {
    if ((one.ignored & bit) != 0) continue;
    ((one.matched & bit) != 0 ? right : wrong) += 1;
    recalls.push_back(right / truths);
    precisions.push_back(right / (wrong + right + std::numeric_limits<double>::epsilon()));
  }
  for (size_t i = precisions.size(); i > 1; --i) {
    precisions[i - 2] = std::max(precisions[i - 2], precisions[i - 1]);
  }
  std::array<double, kNumRecalls> result{};
  size_t at = 0;
  for (size_t i = 0; i < kNumRecalls; ++i) {
    while (at < recalls.size() && recalls[at] < recall_point(i)) ++at;
    if (at == recalls.size()) break;
    result[i] = precisions[at];
  }
  return result;
}

double mean_precision(std::span<const MatchedDetection> found, uint64_t bit, double truths) {
  const auto precisions = precisions_of(found, bit, truths);
  return std::accumulate(precisions.begin(), precisions.end(), 0.0) / kNumRecalls;
}

/// The value of a figure for one class.
/// @param truths number of truths in the area
double value_of(const Summary& summary, std::span<const MatchedDetection> found, int64_t truths) {
  if (truths == 0) return kNone;
  const auto total = static_cast<double>(truths);
  double sum = 0;
  for (size_t i = 0; i < summary.num_thresholds; ++i) {
    const uint64_t bit = bit_of(summary.area, summary.first_threshold + i);
    sum += summary.is_recall ? recall(found, bit, summary.max_detections, total)
                             : mean_precision(found, bit, total);
  }
  return sum / static_cast<double>(summary.num_thresholds);
}

}  // namespace

std::vector<MatchedDetection> match(int64_t image_id, std::span<const Truth> truths,
                                    std::span<const Detection> detections) {
  auto sorted_truths = pointers_to(truths);
  std::ranges::stable_sort(sorted_truths, {}, &Truth::label);
  auto sorted = pointers_to(detections);
  std::ranges::stable_sort(
      sorted, {}, [](const Detection* one) { return std::tuple(one->label, -one->score); });
  std::vector<MatchedDetection> all;
  for (auto begin = sorted.begin(); begin != sorted.end();) {
    const int64_t label = (*begin)->label;
    const auto of_class = of_label(sorted, label, &Detection::label);
    begin += std::ssize(of_class);
    const auto best = of_class.first(std::min<size_t>(of_class.size(), kMaxDetections));
    const size_t first = all.size();
    for (const Detection* one : best) {
      all.push_back({.label = label,
                     .image_id = image_id,
                     .place = std::ssize(all) - static_cast<int64_t>(first),
                     .score = one->score});
    }
    ClassMatcher matcher(of_label(sorted_truths, label, &Truth::label), best);
    for (size_t area = 0; area < kNumAreas; ++area) {
      matcher.match(area, std::span(all).subspan(first));
    }
  }
  return all;
}

void count_truths(std::span<const Truth> truths, std::span<int64_t> counts) {
  for (const Truth& truth : truths) {
    for (size_t area = 0; area < kNumAreas; ++area) {
      if (truth.is_crowd || !kAreas[area].contains(truth.area)) continue;
      ++counts[static_cast<size_t>(truth.label) * kNumAreas + area];
    }
  }
}

AveragePrecision average_precision(std::vector<MatchedDetection> matched,
                                   std::span<const int64_t> counts) {
  sort_by_label_and_score(matched);
  const size_t classes = counts.size() / kNumAreas;
  AveragePrecision result;
  std::vector<double> values(classes);
  for (size_t s = 0; s < kSummaries.size(); ++s) {
    for (size_t label = 0; label < classes; ++label) {
      const auto found = of_label(matched, static_cast<int64_t>(label), &MatchedDetection::label);
      values[label] =
          value_of(kSummaries[s], found, counts[label * kNumAreas + kSummaries[s].area]);
    }
    result.summary[s] = mean_of_present(values, kNone);
    if (s == 0) result.classes = values;
  }
  return result;
}

PrecisionCurves precision_curves(std::vector<MatchedDetection> matched,
                                 std::span<const int64_t> counts) {
  sort_by_label_and_score(matched);
  PrecisionCurves curves{};
  double present = 0;  // classes
  for (size_t label = 0; label < counts.size() / kNumAreas; ++label) {
    const int64_t truths = counts[label * kNumAreas];
    if (truths == 0) continue;
    ++present;
    const auto found = of_label(matched, static_cast<int64_t>(label), &MatchedDetection::label);
    for (size_t t = 0; t < kNumThresholds; ++t) {
      const auto own = precisions_of(found, bit_of(/*area=*/0, t), static_cast<double>(truths));
      for (size_t i = 0; i < kNumRecalls; ++i) curves[t][i] += own[i];
    }
  }
  for (auto& curve : curves) {
    for (double& sum : curve) sum = present > 0 ? sum / present : kNone;
  }
  return curves;
}

}  // namespace syncbn::train
