#include "dense_detector.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/stack.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "box_ops.h"

namespace syncbn::models {

DenseDetector::DenseDetector(const std::string& name, const ModelArgs& args,
                             const DetectionOptions& options, const Shape& shape)
    : options_(options),
      make_anchors_(shape.anchor_scales, shape.anchor_ratios),
      backbone_(register_module(
          "backbone", std::make_shared<ResNetFpn>(name, args, shape.backbone, shape.p6_from_c5))),
      head_(register_module(
          "head", std::make_shared<DenseHead>(args, make_anchors_.per_place(), options.head_norm,
                                              shape.centerness))) {}

std::vector<at::Tensor> DenseDetector::forward_all(at::Tensor images) {
  const std::vector<at::Tensor> levels = backbone_->forward(images);
  std::vector<at::Tensor> outputs = head_->forward(levels);
  for (at::Tensor& anchors : make_anchors_(images, levels)) outputs.push_back(std::move(anchors));
  return outputs;
}

std::string DenseDetector::present_name(const std::string& name) const {
  for (int i = 0; i < 4; ++i) {
    // In the heads, the ReLU after each convolution had a number as well.
    for (const auto& [part, number] : {std::pair("_blocks.", i), std::pair("_head.conv.", 2 * i)}) {
      const std::string old = fmt::format("{}{}.", part, number);
      const size_t begin = name.find(old);
      if (begin == std::string::npos) continue;
      return std::string(name).replace(begin, old.size(), fmt::format("{}{}.0.", part, i));
    }
  }
  return name;
}

std::vector<at::Tensor> DenseDetector::anchors_of(const std::vector<at::Tensor>& outputs) const {
  return {outputs.end() - static_cast<ptrdiff_t>(make_anchors_.levels()), outputs.end()};
}

DenseDetector::Predictions DenseDetector::predictions_of(
    const std::vector<at::Tensor>& outputs) const {
  const at::ScalarType type = outputs.back().scalar_type();
  const bool has_centerness = outputs.size() == make_anchors_.levels() + 3;
  const Predictions all = {outputs[0], outputs[1], has_centerness ? outputs[2] : at::Tensor()};
  return all.transformed([&](const at::Tensor& tensor) { return tensor.to(type); });
}

at::Tensor DenseDetector::loss(const std::vector<at::Tensor>& outputs,
                               const at::Tensor& target) const {
  const std::vector<at::Tensor> levels = anchors_of(outputs);
  at::Tensor rows = target.slice(1, 1);
  // Each image needs at least one row, which may be without a box.
  if (rows.size(1) == 0) rows = at::constant_pad_nd(rows, {0, 0, 0, 1}, kBackground);
  std::vector<at::Tensor> labels;
  std::vector<at::Tensor> boxes;
  for (const at::Tensor& image : rows.unbind()) {
    Assignment assignment = assign(image.select(1, 0).to(at::kLong),
                                   image.slice(1, 1).to(levels.front().scalar_type()), levels);
    labels.push_back(std::move(assignment.labels));
    boxes.push_back(std::move(assignment.boxes));
  }
  return loss_of(predictions_of(outputs), at::cat(levels),
                 {.labels = at::stack(labels), .boxes = at::stack(boxes)});
}

std::vector<Detections> DenseDetector::detect(const std::vector<at::Tensor>& outputs,
                                              const at::Tensor& sizes) const {
  const at::NoGradGuard no_grad;
  const std::vector<at::Tensor> levels = anchors_of(outputs);
  const Predictions predictions = predictions_of(outputs);
  const at::Tensor pixels = sizes.to(at::kDouble).cpu();
  std::vector<Detections> all;
  for (int64_t i = 0; i < sizes.size(0); ++i) {
    const auto height = pixels[i][0].item<double>();
    const auto width = pixels[i][1].item<double>();
    std::vector<at::Tensor> boxes;
    std::vector<at::Tensor> scores;
    std::vector<at::Tensor> labels;
    int64_t begin = 0;
    for (const at::Tensor& anchors : levels) {
      const Predictions level = predictions.transformed([&](const at::Tensor& all_anchors) {
        return all_anchors[i].narrow(0, begin, anchors.size(0));
      });
      Detections found = candidates(level, anchors, height, width);
      boxes.push_back(std::move(found.boxes));
      scores.push_back(std::move(found.scores));
      labels.push_back(std::move(found.labels));
      begin += anchors.size(0);
    }
    const Detections found = {at::cat(boxes), at::cat(scores), at::cat(labels)};
    const at::Tensor kept = nms(found.boxes, found.scores, found.labels, options_.nms_thresh,
                                options_.detections_per_img);
    all.push_back({.boxes = found.boxes.index_select(0, kept),
                   .scores = found.scores.index_select(0, kept),
                   .labels = found.labels.index_select(0, kept)});
  }
  return all;
}

Detections DenseDetector::candidates(const Predictions& level, const at::Tensor& anchors,
                                     double height, double width) const {
  const int64_t classes = level.logits.size(1);
  const at::Tensor all = scores(level).flatten();
  at::Tensor places = (all > options_.score_thresh).nonzero().squeeze(1);
  const auto [best, order] =
      all.index_select(0, places).topk(std::min(options_.topk_candidates, places.size(0)));
  places = places.index_select(0, order);
  const at::Tensor anchor = places.div(classes, "floor");
  const at::Tensor boxes =
      decode(level.regression.index_select(0, anchor), anchors.index_select(0, anchor));
  return {.boxes = clip_boxes(boxes, height, width),
          .scores = best,
          .labels = places.remainder(classes)};
}

}  // namespace syncbn::models
