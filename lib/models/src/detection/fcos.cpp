#include <ATen/ops/binary_cross_entropy_with_logits.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/where.h>

#include <limits>
#include <string>
#include <vector>

#include "../families.h"
#include "box_ops.h"
#include "dense_detector.h"
#include "losses.h"

namespace syncbn::models {
namespace {

struct FcosOptions : DetectionOptions {
  double center_sampling_radius = 1.5;

  FcosOptions() {
    score_thresh = 0.2;
    nms_thresh = 0.6;
    detections_per_img = 100;
    head_norm = "group";
  }

  static void describe(config::Schema<FcosOptions>& schema) {
    describe_detection(schema);
    schema
        .field("center_sampling_radius", &FcosOptions::center_sampling_radius,
               "in training, places this near the centre of a box are to find it; in strides of "
               "the level")
        .above(0);
  }
};

/// How close an anchor's centre is to the centre of its box (equation 3): 1 there, 0 on a side.
/// @param distances [..., 4], see encode_distances()
at::Tensor centerness_of(const at::Tensor& distances) {
  const auto sides = distances.unbind(-1);  // left, top, right, bottom
  const auto ratio = [&](int a, int b) {
    return at::minimum(sides[a], sides[b]) / at::maximum(sides[a], sides[b]);
  };
  return (ratio(0, 2) * ratio(1, 3)).sqrt();
}

/// FCOS (Tian et al., arXiv:1904.01355), with center sampling (arXiv:2006.09214). Each place has
/// one square anchor, whose side is the stride of its level.
class Fcos : public DenseDetector {
 public:
  Fcos(const std::string& name, const ModelArgs& args, const FcosOptions& options)
      : DenseDetector(name, args, options,
                      {.anchor_scales = {{8}, {16}, {32}, {64}, {128}},
                       .anchor_ratios = {1},
                       .centerness = true}),
        radius_(options.center_sampling_radius) {}

 protected:
  Assignment assign(const at::Tensor& labels, const at::Tensor& boxes,
                    const std::vector<at::Tensor>& levels) const override {
    const at::Tensor anchors = at::cat(levels);
    const at::Tensor strides = anchors.select(1, 2) - anchors.select(1, 0);
    // Bounds of the largest distance at each place, in pixels: 4 to 8 strides of its level; the
    // first level has no lower and the last no upper bound.
    const at::Tensor lower = 4 * strides;
    const at::Tensor upper = 8 * strides;
    lower.slice(0, 0, levels.front().size(0)).zero_();
    upper.slice(0, -levels.back().size(0)).fill_(std::numeric_limits<double>::infinity());
    const auto middle = [](const at::Tensor& all) {
      return (all.slice(1, 0, 2) + all.slice(1, 2)) / 2;
    };
    const at::Tensor places = middle(anchors);
    // [M, A]: a row for each box, a column for each place.
    const at::Tensor from_centre = (middle(boxes).unsqueeze(1) - places).abs_().amax(-1);
    const at::Tensor distances = at::cat(
        {places - boxes.slice(1, 0, 2).unsqueeze(1), boxes.slice(1, 2).unsqueeze(1) - places}, -1);
    const at::Tensor farthest = distances.amax(-1);
    const at::Tensor is_inside = distances.amin(-1) > 0;
    const at::Tensor fits = is_inside & (from_centre < radius_ * strides) & (farthest > lower) &
                            (farthest < upper) & (labels >= 0).unsqueeze(1);
    // A place within several boxes is assigned the smallest.
    const at::Tensor sides = boxes.slice(1, 2) - boxes.slice(1, 0, 2);
    const at::Tensor area = sides.prod(1).unsqueeze(1);
    const auto [smallest, index] =
        area.masked_fill(fits.logical_not(), std::numeric_limits<double>::infinity()).min(0);
    const at::Tensor is_foreground = fits.any(0);
    return {.labels = at::where(is_foreground, labels.index_select(0, index), kBackground),
            .boxes = at::where(is_foreground.unsqueeze(1), boxes.index_select(0, index), anchors)};
  }

  /// The sum of the losses of all images, divided by their number of places with a box.
  at::Tensor loss_of(const Predictions& predictions, const at::Tensor& anchors,
                     const Assignment& assignment) const override {
    const at::Tensor is_background = assignment.labels < 0;
    const at::Tensor classification = focal_loss(predictions.logits, assignment.labels);
    const at::Tensor regression =
        giou_loss(decode_distances(predictions.regression, anchors), assignment.boxes);
    const at::Tensor centerness = at::binary_cross_entropy_with_logits(
        predictions.centerness.squeeze(-1),
        centerness_of(encode_distances(assignment.boxes, anchors)), /*weight=*/{},
        /*pos_weight=*/{}, at::Reduction::None);
    const at::Tensor of_boxes = (regression + centerness).masked_fill(is_background, 0);
    const at::Tensor places = is_background.logical_not().sum().clamp_min(1);
    return (classification.sum() + of_boxes.sum()) / places;
  }

  at::Tensor decode(const at::Tensor& regression, const at::Tensor& anchors) const override {
    return decode_distances(regression, anchors);
  }

  at::Tensor scores(const Predictions& predictions) const override {
    return (at::sigmoid(predictions.logits) * at::sigmoid(predictions.centerness)).sqrt();
  }

 private:
  double radius_;
};

}  // namespace

void add_fcos(ModelKind::Registry& registry) {
  add_network<FcosOptions, Fcos>(registry, "fcos_resnet50_fpn",
                                 "FCOS (Tian et al., arXiv:1904.01355) for detection");
}

}  // namespace syncbn::models
