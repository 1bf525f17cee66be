#include <ATen/Functions.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/error.h>
#include <syncbn/data/synthetic.h>
#include <syncbn/models/model.h>
#include <syncbn/train/task.h>

#include <algorithm>
#include <cmath>
#include <sstream>
#include <utility>

#include "support/from_yaml.h"
#include "support/program.h"
#include "support/python.h"
#include "support/skip.h"
#include "support/text.h"
#include "support/thrown.h"

namespace syncbn::train {
namespace {

using ::testing::HasSubstr;

std::shared_ptr<const data::Dataset> images(int64_t classes) {
  return data::make_synthetic({.size = 20, .height = 4, .width = 4, .classes = classes},
                              data::Split::kTrain);
}

std::unique_ptr<Task> task(const std::string& yaml, int64_t classes = 4) {
  return test::from_yaml<TaskKind>(yaml, "task").make(*images(classes));
}

std::string task_error(const std::string& yaml) {
  return test::message_of<base::UserError>([&] { task(yaml); });
}

/// The result that loss_sum() returns for these losses.
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

TEST(MetricTest, IsShownInTheDigitsThatPeopleRead) {
  EXPECT_EQ(shown({.name = {}, .is_share = true}, 0.98311), "98.31 %");
  EXPECT_EQ(shown({}, 0.04291), "0.0429");
  EXPECT_EQ(shown({}, 999999.5), "999999.5000");
  EXPECT_EQ(shown({}, -2.86e22), "-2.860e+22");
}

TEST_F(TaskTest, CrossEntropyIsTheMeanOfTheTargetsLikelihood) {
  const auto plain = task("classification");
  const at::Tensor expected = -(likelihood_ * one_hot_).sum(1);
  EXPECT_TRUE(at::allclose(plain->loss({output_}, target_), expected.mean()));
  EXPECT_TRUE(at::allclose(plain->loss_sum({output_}, target_), sum_and_number(expected)));
}

TEST_F(TaskTest, AGanTakesImagesOfOneSize) {
  const auto gan = test::from_yaml<models::ModelKind>("dcgan", "model")
                       .make(models::ModelArgs{.num_classes = 1, .sample_shape = {3, 8, 8}});
  EXPECT_EQ(test::message_of<base::UserError>([&] { task("gan")->attach(*gan); }),
            "it generates images [3, 8, 8], as the training data has, and those to evaluate on "
            "are [3, 4, 4] (channels, height, width); give transforms and test_transforms one "
            "size");
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
  // After rolling by one, only the last two labels equal their neighbours.
  EXPECT_TRUE(at::equal(counts, at::tensor({6, 1}, at::kLong)));
  EXPECT_EQ(few->num_counts(), 2);
  ASSERT_EQ(few->training_metrics(std::vector<int64_t>{4, 3}).size(), 1U);
  EXPECT_EQ(few->training_metrics(std::vector<int64_t>{4, 3})[0].value, 0.75);
  EXPECT_EQ(few->metrics(std::vector<int64_t>{0, 0}, {})[0].value, 0) << "of no samples";

  const auto many = task("classification", 10);
  // Class 9 has the highest score, then 8, 7, ...
  const at::Tensor descending = at::arange(10, at::kFloat).repeat({10, 1});
  EXPECT_TRUE(
      at::equal(many->counts({descending}, at::arange(10)), at::tensor({10, 1, 5}, at::kLong)));
  const auto metrics = many->training_metrics(std::vector<int64_t>{10, 1, 5});
  ASSERT_EQ(metrics.size(), 2U);
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
    // CutMix keeps or replaces pixels, MixUp blends nearly all of them.
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

/// Data with classes of these names. No test reads its samples.
class Named : public data::Dataset {
 public:
  explicit Named(std::vector<std::string> names) : names_(std::move(names)) {}

  int64_t size() const override { return 1; }
  data::Batch get_batch(std::span<const int64_t>) const override { return {}; }
  std::span<const int64_t> labels() const override { return {}; }
  int64_t num_classes() const override { return std::ssize(names_); }
  std::vector<std::string> class_names() const override { return names_; }
  std::vector<int64_t> sample_shape() const override { return {3, 4, 4}; }
  uint64_t fingerprint() const override { return 1; }

 private:
  std::vector<std::string> names_;
};

const std::vector<std::string> kAnimals = {"cat", "dog", "bird", "fox", "owl", "elk", "bee"};

std::unique_ptr<Task> classification(const std::vector<std::string>& names = kAnimals) {
  return test::from_yaml<TaskKind>("classification", "task").make(Named(names));
}

/// The results of an evaluation.
struct Report {
  std::vector<Metric> metrics;
  std::string remark;
  std::string table;  ///< content of confusion.csv

  double value(const std::string& name) const {
    const auto found = std::ranges::find(metrics, name, &Metric::name);
    EXPECT_NE(found, metrics.end()) << name;
    return found == metrics.end() ? 0 : found->value;
  }
};

/// Evaluates batches of these sizes, from the last to the first.
Report evaluate(const Task& task, const at::Tensor& output, const at::Tensor& target,
                const std::vector<int64_t>& sizes) {
  at::Tensor counts = at::zeros({task.num_counts()}, at::kLong);
  std::vector<at::Tensor> records = {at::empty({0}, at::kLong)};
  const auto outputs = output.split_with_sizes(sizes);
  const auto targets = target.split_with_sizes(sizes);
  for (size_t i = sizes.size(); i-- > 0;) {
    counts += task.counts({outputs[i]}, targets[i]);
    records.push_back(task.records({outputs[i]}, targets[i]));
  }
  const at::Tensor all = at::cat(records);
  const std::span<const int64_t> sums(counts.const_data_ptr<int64_t>(),
                                      static_cast<size_t>(counts.numel()));
  const std::span<const int64_t> values(all.const_data_ptr<int64_t>(),
                                        static_cast<size_t>(all.numel()));
  const auto tables = task.tables(sums, values);
  EXPECT_EQ(tables.size(), 1U);
  EXPECT_EQ(tables.at(0).name, "confusion.csv");
  return {.metrics = task.metrics(sums, values),
          .remark = task.remark(sums, values),
          .table = tables.at(0).text};
}

TEST(ClassificationReportTest, CountsTheSamplesOfEachClassInAnyBatchesAndOrder) {
  at::manual_seed(2);
  const at::Tensor output = at::randn({50, 7});
  const at::Tensor target = at::randint(6, {50}, at::kLong);  // no bee
  std::vector<std::vector<int64_t>> matrix(7, std::vector<int64_t>(7));
  int64_t right = 0;
  for (int64_t i = 0; i < 50; ++i) {
    int64_t answer = 0;
    for (int64_t j = 1; j < 7; ++j) {
      if (output[i][j].item<float>() > output[i][answer].item<float>()) answer = j;
    }
    const auto label = target[i].item<int64_t>();
    ++matrix[static_cast<size_t>(label)][static_cast<size_t>(answer)];
    right += answer == label ? 1 : 0;
  }
  std::string table = "label/answer,cat,dog,bird,fox,owl,elk,bee\n";
  double sum = 0;
  std::vector<double> recalls;
  for (size_t label = 0; label < 7; ++label) {
    int64_t samples = 0;
    table += kAnimals[label];
    for (const int64_t count : matrix[label]) {
      table += fmt::format(",{}", count);
      samples += count;
    }
    table += "\n";
    recalls.push_back(static_cast<double>(matrix[label][label]) / static_cast<double>(samples));
    if (label < 6) sum += recalls.back();
  }
  const auto task = classification();
  for (const std::vector<int64_t>& sizes :
       std::vector<std::vector<int64_t>>{{50}, {17, 33}, {1, 20, 29}, {0, 50, 0}}) {
    const Report report = evaluate(*task, output, target, sizes);
    EXPECT_EQ(report.table, table);
    EXPECT_EQ(report.remark, "mean_class_accuracy leaves out a class that no sample has: bee");
    ASSERT_EQ(report.metrics.size(), 3 + kAnimals.size());
    EXPECT_EQ(report.value("accuracy"), static_cast<double>(right) / 50);
    EXPECT_EQ(report.value("mean_class_accuracy"), sum / 6);
    for (size_t label = 0; label < 6; ++label) {
      EXPECT_EQ(report.value("accuracy_" + kAnimals[label]), recalls[label]);
    }
    EXPECT_TRUE(std::isnan(report.value("accuracy_bee")));
  }
}

TEST(ClassificationReportTest, MetricsAreThoseOfPythonsConfusionMatrix) {
  SYNCBN_SKIP_UNLESS(test::python_has_torch(), "python-torch");
  constexpr const char* kReference = R"(
import torch
n = 7
out = torch.sin(torch.arange(90 * n, dtype=torch.float64) ** 1.5).reshape(90, n)
labels = torch.arange(90) % 5
mat = torch.bincount(n * labels + out.argmax(1), minlength=n * n).reshape(n, n).double()
recalls = torch.diag(mat) / mat.sum(1)
print((torch.diag(mat).sum() / mat.sum()).item())
print((out.topk(5, 1).indices == labels[:, None]).any(1).double().mean().item())
print(recalls.nanmean().item(), *recalls.tolist())
)";
  const auto result = test::run_program({test::python(), "-c", kReference});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const at::Tensor output = at::sin(at::arange(90 * 7, at::kDouble).pow(1.5)).reshape({90, 7});
  const Report report = evaluate(*classification(), output, at::arange(90).remainder(5), {40, 50});
  std::istringstream numbers(result.out);
  size_t compared = 0;
  for (std::string expected; numbers >> expected; ++compared) {
    ASSERT_LT(compared, report.metrics.size());
    const auto& [name, value, unused, share] = report.metrics[compared];
    if (expected == "nan") {
      EXPECT_TRUE(std::isnan(value)) << name;
    } else {
      EXPECT_NEAR(value, std::stod(expected), 1e-15) << name;
    }
  }
  EXPECT_EQ(compared, report.metrics.size());
}

TEST(ClassificationReportTest, NamesMayHoldAnyCharacter) {
  const auto task = classification({"a,b", "say \"hi\"", "two\nlines", "\xe9t\xe9"});
  const Report report =
      evaluate(*task, at::eye(4).slice(0, 0, 3), at::tensor({0, 1, 1}, at::kLong), {3});
  EXPECT_EQ(report.table,
            "label/answer,\"a,b\",\"say \"\"hi\"\"\",\"two\nlines\",\xe9t\xe9\n"
            "\"a,b\",1,0,0,0\n"
            "\"say \"\"hi\"\"\",0,1,1,0\n"
            "\"two\nlines\",0,0,0,0\n"
            "\xe9t\xe9,0,0,0,0\n");
  EXPECT_EQ(report.value("accuracy_say_\"hi\""), 0.5);
  EXPECT_TRUE(std::isnan(report.value("accuracy_two\\x0alines")));
  EXPECT_TRUE(std::isnan(report.value("accuracy_\\xe9t\\xe9"))) << "JSON is UTF-8";
}

TEST(ClassificationReportTest, MetricsHaveNoSpacesAndOneNameForEachClass) {
  const auto task =
      classification({"cross bar", "cross_bar", "cross  bar", "cross_bar_2", "cross_bar"});
  const Report report = evaluate(*task, at::eye(5), at::arange(5), {5});
  std::vector<std::string> names;
  for (const Metric& metric : report.metrics) names.push_back(metric.name);
  EXPECT_THAT(names,
              ::testing::ElementsAre("accuracy", "mean_class_accuracy", "accuracy_cross_bar_4",
                                     "accuracy_cross_bar", "accuracy_cross__bar",
                                     "accuracy_cross_bar_2", "accuracy_cross_bar_3"));
  EXPECT_EQ(report.table.substr(0, report.table.find('\n')),
            "label/answer,cross bar,cross_bar,cross  bar,cross_bar_2,cross_bar");
}

TEST(ClassificationReportTest, OneClassOrNoSampleIsNoError) {
  const Report one =
      evaluate(*classification({"cat"}), at::rand({3, 1}), at::zeros({3}, at::kLong), {3});
  EXPECT_EQ(one.table, "label/answer,cat\ncat,3\n");
  EXPECT_EQ(one.value("mean_class_accuracy"), 1);
  EXPECT_THAT(one.remark, HasSubstr("one class only"));
  const Report none =
      evaluate(*classification({"cat", "dog"}), at::rand({0, 2}), at::zeros({0}, at::kLong), {0});
  EXPECT_EQ(none.table, "label/answer,cat,dog\ncat,0,0\ndog,0,0\n");
  EXPECT_EQ(none.value("accuracy"), 0);
  EXPECT_EQ(none.value("mean_class_accuracy"), 0);
  EXPECT_EQ(none.remark, "mean_class_accuracy leaves out classes that no sample has: cat, dog");
}

TEST(ClassificationReportTest, AnIgnoredLabelIsInNoClass) {
  const Report report =
      evaluate(*classification({"cat", "dog"}), at::eye(2), at::tensor({0, -100}, at::kLong), {2});
  EXPECT_EQ(report.table, "label/answer,cat,dog\ncat,1,0\ndog,0,0\n");
}

TEST(ClassificationReportTest, WithThousandsOfClassesTheTableListsCells) {
  const auto report_of = [](int64_t classes) {
    std::vector<std::string> names;
    for (int64_t i = 0; i < classes; ++i) names.push_back(fmt::format("n{}", i));
    const at::Tensor answers = at::tensor({classes - 1, int64_t{5}, int64_t{5}}, at::kLong);
    return evaluate(*classification(names), at::one_hot(answers, classes).to(at::kFloat),
                    at::tensor({classes - 1, int64_t{0}, int64_t{0}}, at::kLong), {2, 1});
  };
  const Report matrix = report_of(1200);
  EXPECT_EQ(test::count(matrix.table, "\n"), 1201);
  EXPECT_THAT(matrix.table, HasSubstr("\nn0,0,0,0,0,0,2,0,"));
  EXPECT_EQ(matrix.metrics.size(), 1203U);
  EXPECT_EQ(matrix.value("accuracy_n1199"), 1);
  EXPECT_EQ(matrix.remark,
            "mean_class_accuracy leaves out classes that no sample has: n1, n2, n3, n4, n5, n6, "
            "n7, n8, n9, n10, and 1188 more");
  const Report list = report_of(2500);
  EXPECT_EQ(list.table, "label,answer,count\nn0,n5,2\nn2499,n2499,1\n");
  EXPECT_EQ(list.value("mean_class_accuracy"), 0.5);
}

}  // namespace
}  // namespace syncbn::train
