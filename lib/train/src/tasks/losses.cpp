#include <ATen/Functions.h>
#include <syncbn/base/error.h>
#include <syncbn/train/loss.h>

#include <algorithm>

#include "tasks/tasks.h"

namespace syncbn::train {
namespace {

struct NoLossOptions {
  static void describe(config::Schema<NoLossOptions>& /*schema*/) {}
};

/// PyTorch's CrossEntropyLoss of whole images.
class CrossEntropy : public Loss {
 public:
  explicit CrossEntropy(const LossArgs& args)
      : weights_(args.class_weights, args.num_classes),
        may_divide_by_0_(std::ranges::count(args.class_weights, 0) > 0),
        label_smoothing_(args.label_smoothing) {}

  at::Tensor mean(const at::Tensor& logits, const at::Tensor& target) const override {
    const at::Tensor weights = weights_.like(logits);
    const auto reduced = [&](at::Reduction::Reduction reduction) {
      return at::cross_entropy_loss(logits, target, weights, reduction, /*ignore_index=*/-100,
                                    label_smoothing_);
    };
    if (!may_divide_by_0_ || target.dim() > 1) return reduced(at::Reduction::Mean);
    // A batch in which no sample has a weight changes nothing, and neither do its smoothed targets.
    const at::Tensor weight = weights.index_select(0, target).sum();
    const at::Tensor sum = reduced(at::Reduction::Sum);
    return at::where(weight > 0, sum / at::where(weight > 0, weight, 1), sum * 0);
  }

  at::Tensor each(const at::Tensor& logits, const at::Tensor& target) const override {
    return at::cross_entropy_loss(logits, target, {}, at::Reduction::None);
  }

 private:
  ClassWeights weights_;
  bool may_divide_by_0_;
  double label_smoothing_;
};

/// CrossEntropy over the pixels that are not ignored, each with the weight of its class; 0 for a
/// batch without such pixels.
class PixelCrossEntropy : public Loss {
 public:
  explicit PixelCrossEntropy(const LossArgs& args)
      : ignored_label_(*args.ignored_label), weights_(args.class_weights, args.num_classes) {}

  at::Tensor mean(const at::Tensor& logits, const at::Tensor& target) const override {
    at::Tensor weight = target.ne(ignored_label_);
    const at::Tensor weights = weights_.like(logits);
    if (weights.defined()) {
      const at::Tensor labels = target.masked_fill(target.eq(ignored_label_), 0).flatten();
      weight = weights.index_select(0, labels) * weight.flatten();
    }
    const at::Tensor total = weight.sum();
    return at::cross_entropy_loss(logits, target, weights, at::Reduction::Sum, ignored_label_) /
           at::where(total > 0, total, 1);
  }

  at::Tensor each(const at::Tensor& logits, const at::Tensor& target) const override {
    return at::cross_entropy_loss(logits, target, {}, at::Reduction::None, ignored_label_);
  }

 private:
  int64_t ignored_label_;
  ClassWeights weights_;
};

class BinaryCrossEntropy : public Loss {
 public:
  explicit BinaryCrossEntropy(const LossArgs& args)
      : num_classes_(args.num_classes),
        weights_(args.class_weights, num_classes_),
        label_smoothing_(args.label_smoothing) {}

  at::Tensor mean(const at::Tensor& logits, const at::Tensor& target) const override {
    at::Tensor wanted = shares(target);
    if (label_smoothing_ > 0) {
      wanted =
          wanted * (1 - label_smoothing_) + label_smoothing_ / static_cast<double>(num_classes_);
    }
    return at::binary_cross_entropy_with_logits(logits, wanted.to(logits.scalar_type()),
                                                weights_.like(logits));
  }

  at::Tensor each(const at::Tensor& logits, const at::Tensor& target) const override {
    const at::Tensor wanted = shares(target).to(logits.scalar_type());
    return at::binary_cross_entropy_with_logits(logits, wanted, {}, {}, at::Reduction::None)
        .mean(1);
  }

  at::Tensor probabilities(const at::Tensor& logits) const override { return logits.sigmoid(); }

 private:
  /// [B, num_classes]: each class's share of the target.
  at::Tensor shares(const at::Tensor& target) const {
    return target.dim() > 1 ? target : at::one_hot(target, num_classes_).to(at::kFloat);
  }

  int64_t num_classes_;
  ClassWeights weights_;
  double label_smoothing_;
};

}  // namespace

at::Tensor Loss::probabilities(const at::Tensor& logits) const {
  return logits.softmax(1);
}

LossKind::Registry& LossKind::registry() {
  static Registry registry = [] {
    Registry made("loss");
    made.add<NoLossOptions>(
        "cross_entropy", "cross entropy of the classes' softmax",
        [](const NoLossOptions&, const LossArgs& args) -> std::unique_ptr<Loss> {
          if (args.ignored_label) return std::make_unique<PixelCrossEntropy>(args);
          return std::make_unique<CrossEntropy>(args);
        });
    made.add<NoLossOptions>(
        "bce", "binary cross entropy of each class, averaged over classes; for classification",
        [](const NoLossOptions&, const LossArgs& args) {
          if (args.ignored_label) {
            throw base::UserError("task.loss: bce is for classification; set it to cross_entropy");
          }
          return std::make_unique<BinaryCrossEntropy>(args);
        });
    return made;
  }();
  return registry;
}

}  // namespace syncbn::train
