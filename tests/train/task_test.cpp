#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/error.h>
#include <syncbn/data/synthetic.h>
#include <syncbn/train/task.h>

#include "train/from_yaml.h"

namespace syncbn::train {
namespace {

using ::testing::HasSubstr;

std::shared_ptr<const data::Dataset> images(int64_t classes) {
  return data::make_synthetic({.size = 20, .height = 4, .width = 4, .classes = classes},
                              data::Split::kTrain);
}

std::unique_ptr<Task> task(const std::string& yaml, int64_t classes = 4) {
  return from_yaml<TaskKind>(yaml, "task").make(*images(classes));
}

std::string task_error(const std::string& yaml) {
  try {
    task(yaml);
  } catch (const base::UserError& error) {
    return error.what();
  }
  return "no error";
}

/// What loss_sum() returns.
at::Tensor sum_and_number(const at::Tensor& losses) {
  return at::stack({losses.sum(), at::full({}, losses.numel(), losses.options())});
}

class TaskTest : public ::testing::Test {
 protected:
  TaskTest() { at::manual_seed(1); }

  const at::Tensor output_ = at::randn({6, 4}, at::kDouble);
  const at::Tensor target_ = at::tensor({0, 1, 2, 3, 1, 1}, at::kLong);
  const at::Tensor likelihood_ = output_.log_softmax(1);
  const at::Tensor one_hot_ = at::one_hot(target_, 4).to(at::kDouble);
};

TEST_F(TaskTest, CrossEntropyIsTheMeanOfTheTargetsLikelihood) {
  const auto plain = task("classification");
  const at::Tensor expected = -(likelihood_ * one_hot_).sum(1);
  EXPECT_TRUE(at::allclose(plain->loss({output_}, target_), expected.mean()));
  EXPECT_TRUE(at::allclose(plain->loss_sum({output_}, target_), sum_and_number(expected)));
}

TEST_F(TaskTest, SmoothingSpreadsAShareOfTheTarget) {
  const auto smooth = task("{type: classification, label_smoothing: 0.2}");
  const at::Tensor shares = one_hot_ * 0.8 + 0.05;
  EXPECT_TRUE(
      at::allclose(smooth->loss({output_}, target_), -(likelihood_ * shares).sum(1).mean()));
  EXPECT_TRUE(at::allclose(smooth->loss_sum({output_}, target_),
                           sum_and_number(-(likelihood_ * one_hot_).sum(1))))
      << "in evaluation there is none";
}

TEST_F(TaskTest, ClassWeightsAreTheLosssWeights) {
  const auto weighted = task("{type: classification, class_weights: [1, 2, 3, 0]}");
  const at::Tensor weights = at::tensor({1.0, 2.0, 3.0, 0.0}, at::kDouble).index({target_});
  const at::Tensor each = -(likelihood_ * one_hot_).sum(1);
  EXPECT_TRUE(at::allclose(weighted->loss({output_.to(at::kFloat)}, target_),
                           ((each * weights).sum() / weights.sum()).to(at::kFloat)));
  const at::Tensor ignored = output_.narrow(0, 3, 1).to(at::kFloat);
  EXPECT_EQ(weighted->loss({ignored}, target_.narrow(0, 3, 1)).item<float>(), 0)
      << "nothing in this batch counts";
  const auto smoothed =
      task("{type: classification, class_weights: [1, 2, 3, 0], label_smoothing: 0.1}");
  const at::Tensor leaf = ignored.clone().requires_grad_();
  smoothed->loss({leaf}, target_.narrow(0, 3, 1)).backward();
  EXPECT_FALSE(leaf.grad().any().item<bool>()) << "a share of the target is of other classes";
  EXPECT_THAT(task_error("{type: classification, class_weights: [1, 2]}"),
              HasSubstr("task.class_weights has 2 values, the data has 4 classes"));
  EXPECT_THAT(task_error("{type: classification, class_weights: [0, 0, 0, 0]}"),
              HasSubstr("all are 0"));
}

TEST_F(TaskTest, AuxiliaryHeadsAddTheirShareToTheLossAndNothingToTheCounts) {
  const at::Tensor aux = output_.roll(1, 0);
  for (const auto& [yaml, weight] : std::vector<std::pair<std::string, double>>{
           {"classification", 0.3}, {"{type: classification, loss: bce, aux_weight: 2}", 2}}) {
    const auto task_of = task(yaml);
    const at::Tensor expected =
        task_of->loss({output_}, target_) + 2 * weight * task_of->loss({aux}, target_);
    EXPECT_TRUE(at::allclose(task_of->loss({output_, aux, aux}, target_), expected)) << yaml;
    EXPECT_TRUE(at::equal(task_of->loss_sum({output_, aux}, target_),
                          task_of->loss_sum({output_}, target_)));
    EXPECT_TRUE(
        at::equal(task_of->counts({output_, aux}, target_), task_of->counts({output_}, target_)));
  }
}

TEST_F(TaskTest, BinaryCrossEntropyAveragesOverClasses) {
  const auto bce = task("{type: classification, loss: bce, label_smoothing: 0.1}");
  const auto expected = [&](const at::Tensor& shares) {
    const at::Tensor chance = output_.sigmoid();
    return -(shares * chance.log() + (1 - shares) * (1 - chance).log()).mean(1);
  };
  EXPECT_TRUE(at::allclose(bce->loss({output_}, target_), expected(one_hot_ * 0.9 + 0.025).mean()));
  EXPECT_TRUE(at::allclose(bce->loss_sum({output_}, target_), sum_and_number(expected(one_hot_))));
}

TEST_F(TaskTest, LossesOfAnyBatchesHaveTheSameSum) {
  const at::Tensor output = at::randn({50, 4});
  const at::Tensor target = at::randint(4, {50}, at::kLong);
  for (const char* yaml : {"classification", "{type: classification, loss: bce}"}) {
    const auto plain = task(yaml);
    const at::Tensor whole = plain->loss_sum({output}, target);
    EXPECT_NEAR(whole[0].item<double>(), 50 * plain->loss({output}, target).item<double>(), 1e-4);
    for (const int64_t size : {1, 7, 32}) {
      at::Tensor sum = at::zeros({2}, at::kDouble);
      for (int64_t i = 0; i < 50; i += size) {
        sum += plain->loss_sum({output.slice(0, i, i + size)}, target.slice(0, i, i + size));
      }
      EXPECT_TRUE(at::equal(sum, whole)) << yaml << " in batches of " << size;
    }
  }
}

TEST_F(TaskTest, CountsRightAnswersAmongOneAndFive) {
  const auto few = task("classification");
  const at::Tensor counts = few->counts({one_hot_ * 2 + 1}, target_.roll(1));
  EXPECT_EQ(counts.dtype(), at::kLong);
  // Rolled by one, only the last two labels are equal to their neighbours.
  EXPECT_TRUE(at::equal(counts, at::tensor({6, 1}, at::kLong)));
  EXPECT_EQ(few->num_counts(), 2);
  ASSERT_EQ(few->metrics(std::vector<int64_t>{4, 3}, {}).size(), 1U);
  EXPECT_EQ(few->metrics(std::vector<int64_t>{4, 3}, {})[0].value, 0.75);
  EXPECT_EQ(few->metrics(std::vector<int64_t>{0, 0}, {})[0].value, 0) << "of no samples";

  const auto many = task("classification", 10);
  // Class 9 is the likeliest, then 8, 7, ...
  const at::Tensor descending = at::arange(10, at::kFloat).repeat({10, 1});
  EXPECT_TRUE(
      at::equal(many->counts({descending}, at::arange(10)), at::tensor({10, 1, 5}, at::kLong)));
  const auto metrics = many->metrics(std::vector<int64_t>{10, 1, 5}, {});
  EXPECT_EQ(metrics[0].name, "accuracy");
  EXPECT_EQ(metrics[1].name, "top5_accuracy");
  EXPECT_EQ(metrics[1].value, 0.5);
}

TEST_F(TaskTest, MixesImagesAndCountsTheLargerShare) {
  const auto mixing = task("{type: classification, mixup: 0.5, cutmix: 1}");
  const data::Batch batch{at::rand({6, 3, 4, 4}), target_};
  std::vector<bool> mixed_up;
  for (int64_t i = 0; i < 40; ++i) {
    data::SampleRandom random(0, 0, i);
    const data::Batch mixed = mixing->augment(batch, random);
    ASSERT_EQ(mixed.target.sizes(), (at::IntArrayRef{6, 4}));
    EXPECT_TRUE(at::allclose(mixed.target.sum(1), at::ones({6})));
    // CutMix leaves or replaces pixels, MixUp blends nearly all.
    const auto same = (mixed.data == batch.data).logical_or(mixed.data == batch.data.roll(1, 0));
    mixed_up.push_back(!same.all().item<bool>());
    data::SampleRandom again(0, 0, i);
    EXPECT_TRUE(at::equal(mixing->augment(batch, again).data, mixed.data)) << "repeatable";
    EXPECT_EQ(mixing->counts({mixed.target}, mixed.target)[1].item<int64_t>(), 6);
    EXPECT_TRUE(mixing->loss({output_.to(at::kFloat)}, mixed.target).isfinite().item<bool>());
  }
  const auto blends = std::ranges::count(mixed_up, true);
  EXPECT_GT(blends, 8);
  EXPECT_LT(blends, 32);
  data::SampleRandom random(0, 0, 0);
  EXPECT_TRUE(task("classification")->augment(batch, random).data.is_same(batch.data));
}

}  // namespace
}  // namespace syncbn::train
