#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <syncbn/models/detector.h>

#include "anchors.h"
#include "feature_pyramid.h"
#include "heads.h"

namespace syncbn::models {

struct DetectionOptions {
  double score_thresh = 0.05;
  double nms_thresh = 0.5;
  int64_t detections_per_img = 300;
  int64_t topk_candidates = 1000;
  std::string head_norm = "none";
};

/// Adds the fields of DetectionOptions to the schema of a struct that has them.
template <class Options>
void describe_detection(config::Schema<Options>& schema) {
  schema
      .field("score_thresh", &DetectionOptions::score_thresh,
             "boxes with a lower score are not reported")
      .fraction();
  schema
      .field("nms_thresh", &DetectionOptions::nms_thresh,
             "a box is dropped if its IoU with a better one of its class is above this")
      .between(0, 1);
  schema
      .field("detections_per_img", &DetectionOptions::detections_per_img,
             "the most boxes to report for an image")
      .at_least(1);
  schema
      .field("topk_candidates", &DetectionOptions::topk_candidates,
             "the most boxes of each level of the feature pyramid that are compared")
      .at_least(1);
  schema
      .field("head_norm", &DetectionOptions::head_norm,
             "normalisation in the head: batch is batch norm, synchronised with sync_batchnorm")
      .one_of({"none", "group", "batch"});
}

/// A network that classifies anchors at all places of a feature pyramid, and regresses boxes from
/// them.
class DenseDetector : public Detector {
 public:
  struct Shape {
    std::vector<std::vector<float>> anchor_scales;  ///< see AnchorGenerator
    std::vector<float> anchor_ratios;
    ResNetStages backbone = kResNet50;
    bool p6_from_c5 = false;
    bool centerness = false;
  };

  DenseDetector(const std::string& name, const ModelArgs& args, const DetectionOptions& options,
                const Shape& shape);

  at::Tensor forward(at::Tensor images) override { return forward_all(std::move(images)).front(); }
  /// The outputs of DenseHead, and the anchors of each level.
  std::vector<at::Tensor> forward_all(at::Tensor images) override;
  at::Tensor loss(const std::vector<at::Tensor>& outputs, const at::Tensor& target) const override;
  std::vector<Detections> detect(const std::vector<at::Tensor>& outputs,
                                 const at::Tensor& sizes) const override;
  /// The torchvision version that published the weights had no layer around each convolution.
  std::string present_name(const std::string& name) const override;

 protected:
  static constexpr int64_t kBackground = -1;
  static constexpr int64_t kIgnored = -2;

  /// Predictions for the anchors of all levels, converted to the anchors' type because autocast
  /// makes them bfloat16.
  struct Predictions {
    at::Tensor logits;      ///< [..., A, K]
    at::Tensor regression;  ///< [..., A, 4]
    at::Tensor centerness;  ///< [..., A, 1], or undefined

    /// These predictions with `change` applied to each tensor.
    Predictions transformed(const std::function<at::Tensor(const at::Tensor&)>& change) const {
      return {.logits = change(logits),
              .regression = change(regression),
              .centerness = centerness.defined() ? change(centerness) : centerness};
    }
  };

  /// The box that each anchor of an image is to predict.
  struct Assignment {
    at::Tensor labels;  ///< [A], int64; kBackground: no box; kIgnored: not in the loss
    at::Tensor boxes;   ///< [A, 4]; the anchor itself if it has no box, so that losses are finite
  };

  /// @param labels [M], int64; negative: no box
  /// @param boxes [M, 4], M > 0
  /// @param anchors of each level
  virtual Assignment assign(const at::Tensor& labels, const at::Tensor& boxes,
                            const std::vector<at::Tensor>& anchors) const = 0;
  /// @param anchors [A, 4]
  /// @param assignment of all images: [N, A] and [N, A, 4]
  virtual at::Tensor loss_of(const Predictions& predictions, const at::Tensor& anchors,
                             const Assignment& assignment) const = 0;
  virtual at::Tensor decode(const at::Tensor& regression, const at::Tensor& anchors) const = 0;
  /// [..., A, K]
  virtual at::Tensor scores(const Predictions& predictions) const = 0;

 private:
  std::vector<at::Tensor> anchors_of(const std::vector<at::Tensor>& outputs) const;
  Predictions predictions_of(const std::vector<at::Tensor>& outputs) const;
  /// The best anchors of one level of an image, before non-maximum suppression.
  Detections candidates(const Predictions& level, const at::Tensor& anchors, double height,
                        double width) const;

  DetectionOptions options_;
  AnchorGenerator make_anchors_;
  std::shared_ptr<ResNetFpn> backbone_;
  std::shared_ptr<DenseHead> head_;
};

}  // namespace syncbn::models
