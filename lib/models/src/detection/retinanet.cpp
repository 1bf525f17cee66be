#include <ATen/ops/cat.h>
#include <ATen/ops/l1_loss.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/where.h>
#include <fmt/format.h>
#include <syncbn/base/error.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "../families.h"
#include "box_ops.h"
#include "dense_detector.h"
#include "losses.h"

namespace syncbn::models {
namespace {

struct RetinaNetOptions : DetectionOptions {
  double fg_iou_thresh = 0.5;
  double bg_iou_thresh = 0.4;

  template <class Options>
  static void describe(config::Schema<Options>& schema) {
    describe_detection(schema);
    schema
        .field("fg_iou_thresh", &RetinaNetOptions::fg_iou_thresh,
               "in training, an anchor is to find a box if their IoU is at least this")
        .between(0, 1);
    schema
        .field("bg_iou_thresh", &RetinaNetOptions::bg_iou_thresh,
               "in training, an anchor is background if its IoU with all boxes is below this; "
               "anchors between the two are not in the loss")
        .between(0, 1);
  }
};

struct RetinaNetV2Options : RetinaNetOptions {
  RetinaNetV2Options() { head_norm = "group"; }
};

enum class BoxLoss { kL1, kGiou };

DenseDetector::Shape retinanet_shape(const ResNetStages& backbone, bool p6_from_c5) {
  DenseDetector::Shape shape = {.anchor_scales = {},
                                .anchor_ratios = {0.5, 1, 2},
                                .backbone = backbone,
                                .p6_from_c5 = p6_from_c5};
  for (const float side : {32.F, 64.F, 128.F, 256.F, 512.F}) {
    // Thirds of an octave, in whole pixels.
    shape.anchor_scales.push_back(
        {side, std::floor(side * std::exp2(1.F / 3)), std::floor(side * std::exp2(2.F / 3))});
  }
  return shape;
}

/// RetinaNet (Lin et al., arXiv:1708.02002).
class RetinaNet : public DenseDetector {
 public:
  RetinaNet(const std::string& name, const ModelArgs& args, const RetinaNetOptions& options,
            const ResNetStages& backbone, BoxLoss box_loss, bool p6_from_c5)
      : DenseDetector(name, args, options, retinanet_shape(backbone, p6_from_c5)),
        foreground_iou_(options.fg_iou_thresh),
        background_iou_(options.bg_iou_thresh),
        box_loss_(box_loss) {
    if (background_iou_ <= foreground_iou_) return;
    throw base::UserError(fmt::format(
        "model {}: bg_iou_thresh ({}) is above fg_iou_thresh ({}); lower it, or raise the other",
        name, background_iou_, foreground_iou_));
  }

 protected:
  Assignment assign(const at::Tensor& labels, const at::Tensor& boxes,
                    const std::vector<at::Tensor>& levels) const override {
    const at::Tensor anchors = at::cat(levels);
    const at::Tensor is_box = (labels >= 0).unsqueeze(1);
    const at::Tensor iou = box_iou(boxes, anchors).masked_fill_(is_box.logical_not(), -1);
    const auto [best, index] = iou.max(0);
    // An anchor that has a box's highest IoU is foreground, however small that IoU is.
    const at::Tensor is_closest = ((iou == iou.amax(1, /*keepdim=*/true)) & is_box).any(0);
    const at::Tensor is_foreground = (best >= foreground_iou_) | is_closest;
    const at::Tensor without_box = at::where(best < background_iou_, kBackground, kIgnored);
    return {.labels = at::where(is_foreground, labels.index_select(0, index), without_box),
            .boxes = at::where(is_foreground.unsqueeze(1), boxes.index_select(0, index), anchors)};
  }

  /// The mean over all images of an image's losses divided by its number of anchors with a box.
  at::Tensor loss_of(const Predictions& predictions, const at::Tensor& anchors,
                     const Assignment& assignment) const override {
    const at::Tensor is_background = assignment.labels < 0;
    const at::Tensor classification = focal_loss(predictions.logits, assignment.labels)
                                          .masked_fill(assignment.labels == kIgnored, 0);
    const at::Tensor regression = box_loss_of(predictions.regression, anchors, assignment.boxes)
                                      .masked_fill(is_background, 0);
    const at::Tensor boxes = is_background.logical_not().sum(1).clamp_min(1);
    return ((classification + regression).sum(1) / boxes).mean();
  }

  at::Tensor decode(const at::Tensor& regression, const at::Tensor& anchors) const override {
    return decode_offsets(regression, anchors);
  }

  at::Tensor scores(const Predictions& predictions) const override {
    return at::sigmoid(predictions.logits);
  }

 private:
  /// [N, A]
  at::Tensor box_loss_of(const at::Tensor& regression, const at::Tensor& anchors,
                         const at::Tensor& boxes) const {
    if (box_loss_ == BoxLoss::kGiou) return giou_loss(decode_offsets(regression, anchors), boxes);
    return at::l1_loss(regression, encode_offsets(boxes, anchors), at::Reduction::None).sum(-1);
  }

  double foreground_iou_;
  double background_iou_;
  BoxLoss box_loss_;
};

}  // namespace

void add_retinanets(ModelKind::Registry& registry) {
  const std::string help = "RetinaNet (Lin et al., arXiv:1708.02002) for detection";
  for (const auto& [name, backbone] : {std::pair("retinanet_resnet18_fpn", kResNet18),
                                       std::pair("retinanet_resnet50_fpn", kResNet50)}) {
    add_network<RetinaNetOptions, RetinaNet>(registry, name, help, backbone, BoxLoss::kL1,
                                             /*p6_from_c5=*/false);
  }
  add_network<RetinaNetV2Options, RetinaNet>(registry, "retinanet_resnet50_fpn_v2",
                                             help + ", with GIoU loss and group norm in the head",
                                             kResNet50, BoxLoss::kGiou, /*p6_from_c5=*/true);
}

}  // namespace syncbn::models
