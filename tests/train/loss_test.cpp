#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/error.h>
#include <syncbn/data/synthetic.h>
#include <syncbn/train/loss.h>
#include <syncbn/train/task.h>

#include "support/from_yaml.h"

namespace syncbn::train {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

struct FocalOptions {
  double gamma = 2;

  static void describe(config::Schema<FocalOptions>& schema) {
    schema.field("gamma", &FocalOptions::gamma, "exponent").at_least(0);
  }
};

/// Focal loss on a softmax (Lin et al., arXiv:1708.02002, equation 4), as a program may define it.
class Focal : public Loss {
 public:
  explicit Focal(double gamma) : gamma_(gamma) {}

  at::Tensor mean(const at::Tensor& logits, const at::Tensor& target) const override {
    return each(logits, target).mean();
  }

  at::Tensor each(const at::Tensor& logits, const at::Tensor& target) const override {
    const at::Tensor likelihood = at::cross_entropy_loss(logits, target, {}, at::Reduction::None);
    return (1 - (-likelihood).exp()).pow(gamma_) * likelihood;
  }

 private:
  double gamma_;
};

class LossTest : public ::testing::Test {
 protected:
  LossTest() {
    at::manual_seed(1);
    LossKind::registry().add<FocalOptions>("focal", "focal loss",
                                           [](const FocalOptions& options, const LossArgs& args) {
                                             if (!args.class_weights.empty())
                                               throw base::UserError("focal has no class weights");
                                             return std::make_unique<Focal>(options.gamma);
                                           });
  }

  std::unique_ptr<Task> task(const std::string& yaml) {
    return test::from_yaml<TaskKind>(yaml, "task").make(*images_);
  }

  const std::shared_ptr<const data::Dataset> images_ = data::make_synthetic(
      {.size = 20, .height = 4, .width = 4, .classes = 4}, data::Split::kTrain);
  const at::Tensor output_ = at::randn({6, 4}, at::kDouble);
  const at::Tensor target_ = at::tensor({0, 1, 2, 3, 1, 1}, at::kLong);
};

TEST_F(LossTest, OfAProgramIsTrainedOnAndReported) {
  const at::Tensor likelihood = -output_.log_softmax(1).gather(1, target_.unsqueeze(1)).squeeze(1);
  const at::Tensor expected = (1 - (-likelihood).exp()).pow(3) * likelihood;
  const auto focal = task("{type: classification, loss: {type: focal, gamma: 3}}");
  EXPECT_TRUE(at::allclose(focal->loss({output_}, target_), expected.mean()));
  const at::Tensor sum = focal->loss_sum({output_}, target_);
  EXPECT_NEAR(sum[0].item<double>(), expected.sum().item<double>(), 1e-6);
  EXPECT_EQ(sum[1].item<double>(), 6);
}

TEST_F(LossTest, ReadsItsOptionsWithinTheTask) {
  EXPECT_THAT([&] { task("{loss: {type: focal, gamma: -1}, type: classification}"); },
              ThrowsMessage<base::UserError>(HasSubstr("task.loss.gamma: must be at least 0")));
  EXPECT_THAT([&] { task("{type: classification, loss: {type: focal, gama: 1}}"); },
              ThrowsMessage<base::UserError>(HasSubstr("did you mean 'task.loss.gamma'?")));
  EXPECT_THAT([&] { task("{type: classification, loss: vocal}"); },
              ThrowsMessage<base::UserError>(HasSubstr("did you mean 'focal'?")));
}

TEST_F(LossTest, RefusesWhatItDoesNotKnow) {
  EXPECT_THAT([&] { task("{type: classification, loss: focal, class_weights: [1, 1, 1, 2]}"); },
              ThrowsMessage<base::UserError>(HasSubstr("focal has no class weights")));
}

}  // namespace
}  // namespace syncbn::train
