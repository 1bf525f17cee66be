#include <ATen/Functions.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/error.h>
#include <syncbn/data/sample_dataset.h>
#include <syncbn/data/synthetic.h>
#include <syncbn/train/task.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <sstream>

#include "records/worst_samples.h"
#include "support/from_yaml.h"
#include "support/program.h"
#include "support/python.h"
#include "support/skip.h"
#include "support/thrown.h"

namespace syncbn::train {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kClasses = 5;
constexpr int64_t kIgnored = 9;

/// Images of 6 x 7 pixels with a label for each pixel. No test reads them.
class Masks : public data::SampleDataset {
 public:
  explicit Masks(std::vector<std::string> names) : names_(std::move(names)) {}

  int64_t size() const override { return 4; }
  std::span<const int64_t> labels() const override { return {}; }
  int64_t num_classes() const override { return kClasses; }
  std::vector<std::string> class_names() const override { return names_; }
  std::vector<int64_t> sample_shape() const override { return {3, 6, 7}; }
  std::vector<int64_t> target_shape() const override { return {6, 7}; }
  int64_t ignore_index() const override { return kIgnored; }
  uint64_t fingerprint() const override { return 1; }
  void read_sample(int64_t, data::SampleRandom&, const data::SampleSlot&) const override {}

 private:
  std::vector<std::string> names_;
};

std::unique_ptr<Task> segmentation(const std::string& yaml = "segmentation",
                                   const std::vector<std::string>& names = {}) {
  return test::from_yaml<TaskKind>(yaml, "task").make(Masks(names));
}

/// The same values as in kReference.
at::Tensor logits_of(int64_t images, double frequency) {
  return at::sin(at::arange(images * kClasses * 42, at::kDouble) * frequency)
      .reshape({images, kClasses, 6, 7});
}

/// The labels 0 to 3 and ignored pixels: class 4 is predicted but is no label.
at::Tensor labels_of(int64_t images) {
  const at::Tensor labels = at::arange(images * 42).remainder(5);
  return labels.masked_fill(labels.eq(4), kIgnored).reshape({images, 6, 7});
}

/// Loss and gradient from torch.nn.functional.cross_entropy, and the results of ConfusionMatrix in
/// torchvision's references/segmentation/utils.py, with an auxiliary head as in its train.py.
constexpr const char* kReference = R"(
import sys, torch
import torch.nn.functional as F
n, ignored = 5, 9
weight = torch.tensor([1, 2, 0.5, 3, 1], dtype=torch.float64)
def logits(frequency):
    x = torch.sin(torch.arange(3 * n * 42, dtype=torch.float64) * frequency)
    return x.reshape(3, n, 6, 7).requires_grad_()
labels = torch.arange(3 * 42) % 5
labels[labels == 4] = ignored
labels = labels.reshape(3, 6, 7)
for weights in None, weight:
    out, aux = logits(0.7), logits(0.3)
    criterion = lambda x: F.cross_entropy(x, labels, weight=weights, ignore_index=ignored)
    loss = criterion(out) + 0.5 * criterion(aux)
    loss.backward()
    print(loss.item(), (out.grad * out).sum().item(), (aux.grad * aux).sum().item())
a, b = labels.flatten(), logits(0.7).argmax(1).flatten()
k = (a >= 0) & (a < n)
mat = torch.bincount(n * a[k] + b[k], minlength=n**2).reshape(n, n)
print(*mat.flatten().tolist())
h = mat.double()
print((torch.diag(h).sum() / h.sum()).item(), *(torch.diag(h) / (h.sum(1) + h.sum(0) - torch.diag(h))).tolist())
print(*(torch.diag(h) / h.sum(1)).tolist())
)";

TEST(SegmentationTest, LossGradientsAndMetricsAreThoseOfTorchvisionsReference) {
  SYNCBN_SKIP_UNLESS(test::python_has_torch(), "python-torch");
  const auto result = test::run_program({test::python(), "-c", kReference});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  std::istringstream numbers(result.out);
  const auto next = [&] {
    double value = std::nan("");
    numbers >> value;
    return value;
  };
  for (const char* yaml :
       {"segmentation", "{type: segmentation, class_weights: [1, 2, 0.5, 3, 1]}"}) {
    SCOPED_TRACE(yaml);
    const at::Tensor out = logits_of(3, 0.7).requires_grad_();
    const at::Tensor aux = logits_of(3, 0.3).requires_grad_();
    const at::Tensor loss = segmentation(yaml)->loss({out, aux}, labels_of(3));
    loss.backward();
    EXPECT_NEAR(loss.item<double>(), next(), 1e-12);
    EXPECT_NEAR((out.grad() * out).sum().item<double>(), next(), 1e-12);
    EXPECT_NEAR((aux.grad() * aux).sum().item<double>(), next(), 1e-12);
  }
  const auto plain = segmentation();
  const at::Tensor counts = plain->counts({logits_of(3, 0.7)}, labels_of(3));
  ASSERT_EQ(counts.numel(), plain->num_counts());
  std::vector<int64_t> cells(counts.const_data_ptr<int64_t>(),
                             counts.const_data_ptr<int64_t>() + counts.numel());
  for (const int64_t cell : cells) EXPECT_EQ(static_cast<double>(cell), next());
  const auto metrics = plain->metrics(cells, {});
  ASSERT_EQ(metrics.size(), 2U + 2U * kClasses);
  EXPECT_EQ(metrics[1].name, "pixel_accuracy");
  EXPECT_DOUBLE_EQ(metrics[1].value, next());
  double sum = 0;
  for (size_t i = 2; i < 2 + kClasses; ++i) {
    EXPECT_DOUBLE_EQ(metrics[i].value, next()) << metrics[i].name;
    sum += metrics[i].value;
  }
  // Class 4 is no label: NaN, which Python gets as 0 / 0.
  for (size_t i = 2 + kClasses; i + 1 < metrics.size(); ++i) {
    EXPECT_DOUBLE_EQ(metrics[i].value, next()) << metrics[i].name;
  }
  EXPECT_TRUE(std::isnan(metrics.back().value));
  EXPECT_EQ(metrics[0].name, "miou");
  EXPECT_DOUBLE_EQ(metrics[0].value, sum / kClasses);
  EXPECT_GT(metrics[0].value, 0);
}

TEST(SegmentationTest, CountsAddUpToThoseOfTheWholeBatch) {
  const auto plain = segmentation();
  const at::Tensor logits = logits_of(6, 0.7);
  const at::Tensor labels = labels_of(6);
  const at::Tensor whole = plain->counts({logits}, labels);
  EXPECT_EQ(whole.sum().item<int64_t>(), labels.ne(kIgnored).sum().item<int64_t>());
  at::Tensor losses = plain->loss_sum({logits}, labels);
  EXPECT_EQ(losses[1].item<double>(), whole.sum().item<double>());
  for (const int64_t parts : {2, 3}) {
    at::Tensor counts = at::zeros_like(whole);
    at::Tensor sums = at::zeros_like(losses);
    for (int64_t i = 0; i < parts; ++i) {
      const Task::Outputs part = {logits.tensor_split(parts)[static_cast<size_t>(i)]};
      const at::Tensor own = labels.tensor_split(parts)[static_cast<size_t>(i)];
      counts += plain->counts(part, own);
      sums += plain->loss_sum(part, own);
    }
    EXPECT_TRUE(at::equal(counts, whole)) << parts;
    EXPECT_TRUE(at::allclose(sums, losses)) << parts;
  }
}

TEST(SegmentationTest, AbsentClassesAreLeftOutOfTheMeanAndNamed) {
  const auto named = segmentation("segmentation", {"sky", "road", "car", "dog", "cat"});
  std::vector<int64_t> counts(kClasses * kClasses);
  EXPECT_EQ(named->metrics(counts, {})[0].value, 0) << "of no pixel";
  counts[0] = 6;             // sky, right
  counts[kClasses + 1] = 1;  // road, right
  counts[kClasses + 2] = 3;  // road, predicted as car
  const auto metrics = named->metrics(counts, {});
  EXPECT_DOUBLE_EQ(metrics[0].value, (1 + 0.25 + 0) / 3) << "a class that is only predicted counts";
  EXPECT_DOUBLE_EQ(metrics[1].value, 0.7);
  EXPECT_EQ(metrics[3].name, "iou_road");
  EXPECT_DOUBLE_EQ(metrics[3].value, 0.25);
  EXPECT_TRUE(std::isnan(metrics[5].value));
  EXPECT_EQ(metrics[8].name, "accuracy_road");
  EXPECT_DOUBLE_EQ(metrics[8].value, 0.25);
  EXPECT_TRUE(std::isnan(metrics[9].value)) << "no pixel of a car";
  EXPECT_EQ(named->remark(counts, {}), "miou leaves out classes that no pixel has: dog, cat");
  counts[24] = counts[18] = 1;
  EXPECT_EQ(named->remark(counts, {}), "");
}

TEST(SegmentationTest, TheConfusionMatrixIsATable) {
  const auto named = segmentation("segmentation", {"sky", "road", "car, van", "dog", "cat"});
  std::vector<int64_t> counts(kClasses * kClasses);
  counts[0] = 6;
  counts[kClasses + 2] = 300;  // road, predicted as car
  counts[24] = 1;
  const auto tables = named->tables(counts, {});
  ASSERT_EQ(tables.size(), 1U);
  EXPECT_EQ(tables[0].name, "confusion.csv");
  EXPECT_EQ(tables[0].text,
            "label/answer,sky,road,\"car, van\",dog,cat\n"
            "sky,6,0,0,0,0\n"
            "road,0,0,300,0,0\n"
            "\"car, van\",0,0,0,0,0\n"
            "dog,0,0,0,0,0\n"
            "cat,0,0,0,0,1\n");
}

TEST(SegmentationTest, ABatchOfIgnoredPixelsChangesNothing) {
  for (const char* yaml :
       {"segmentation", "{type: segmentation, class_weights: [0, 1, 1, 1, 1]}"}) {
    const at::Tensor out = logits_of(2, 0.7).requires_grad_();
    at::Tensor labels = at::full({2, 6, 7}, kIgnored, at::kLong);
    if (yaml[0] == '{') labels[0].fill_(0);  // the class with weight 0
    const at::Tensor loss = segmentation(yaml)->loss({out, out}, labels);
    EXPECT_EQ(loss.item<double>(), 0) << yaml;
    loss.backward();
    EXPECT_EQ(out.grad().abs().max().item<double>(), 0) << yaml;
  }
}

TEST(SegmentationTest, PicturesShowAnImageItsLabelsAndTheNetworksAnswers) {
  const data::Normalization half{{0.5, 0.5, 0.5}, {0.5, 0.5, 0.5}};
  at::Tensor labels = at::ones({2, 6, 7}, at::kLong);
  labels.select(1, 0).fill_(0);
  labels.select(1, 5).fill_(kIgnored);
  at::Tensor logits = at::zeros({2, kClasses, 6, 7});
  logits.select(1, 2).fill_(1);
  const Task::Seen seen{.batch = {.data = at::full({2, 3, 6, 7}, -1), .target = labels},
                        .outputs = {logits}};
  for (const int64_t samples : {1, 4}) {
    const auto task = segmentation(fmt::format("{{type: segmentation, samples: {}}}", samples));
    EXPECT_EQ(task->pictured_samples(), samples);
    const auto pictures = task->pictures(std::array{seen}, half);
    ASSERT_EQ(pictures.size(), 1);
    const data::Image& image = pictures.front().image;
    EXPECT_EQ(image.width, 3 * 7);
    EXPECT_EQ(image.height, std::min<int64_t>(samples, 2) * 6);
    const auto pixel = [&](int64_t x, int64_t y) {
      const uint8_t* const at = image.row(y) + 3 * x;
      return std::array<int, 3>{at[0], at[1], at[2]};
    };
    using Color = std::array<int, 3>;
    EXPECT_EQ(pixel(0, 3), (Color{0, 0, 0}));
    EXPECT_EQ(pixel(7, 0), (Color{0, 0, 0}));        // the background
    EXPECT_EQ(pixel(7, 3), (Color{64, 0, 0}));       // VOC's color of class 1 is {128, 0, 0}
    EXPECT_EQ(pixel(7, 5), (Color{255, 255, 255}));  // ignored
    EXPECT_EQ(pixel(14, 0), (Color{0, 64, 0}));      // of class 2, which is {0, 128, 0}
  }
  EXPECT_TRUE(segmentation()->pictures({}, half).empty());
}

TEST(SegmentationTest, TheSamplesWithTheHighestLossesAreKept) {
  const auto task = segmentation("{type: segmentation, samples: 2}");
  WorstSamples worst(*task);
  const at::Tensor labels = at::zeros({1, 6, 7}, at::kLong);
  const auto add = [&](const std::vector<double>& wrong) {
    std::vector<at::Tensor> data;
    std::vector<at::Tensor> logits;
    for (const double value : wrong) {
      data.push_back(at::full({3, 6, 7}, value, at::kDouble));
      logits.push_back(at::zeros({kClasses, 6, 7}, at::kDouble));
      logits.back()[1].fill_(value);
    }
    const auto samples = static_cast<int64_t>(wrong.size());
    const data::Batch batch{.data = at::stack(data), .target = labels.repeat({samples, 1, 1})};
    const Task::Outputs outputs = {at::stack(logits)};
    worst.add(batch, outputs, task->loss_sum(outputs, batch.target));
  };
  add({5, 1, std::nan("")});
  add({2});
  add({7, -1});
  std::vector<double> kept;
  for (const Task::Seen& seen : worst.take()) {
    EXPECT_EQ(seen.outputs.front().size(0), 1);
    kept.push_back(seen.batch.data[0][0][0][0].item<double>());
  }
  EXPECT_EQ(kept, (std::vector<double>{7, 5}));
}

TEST(SegmentationTest, DataOfTheOtherTaskIsRefused) {
  const auto error = [](const std::string& yaml, const data::Dataset& dataset) {
    return test::message_of<base::UserError>(
        [&] { test::from_yaml<TaskKind>(yaml, "task").make(dataset); });
  };
  const auto images = data::make_synthetic({.size = 4}, data::Split::kTrain);
  EXPECT_THAT(error("segmentation", *images),
              HasSubstr("segmentation needs a label for each pixel"));
  EXPECT_THAT(error("classification", Masks({})), HasSubstr("set task to segmentation"));
  EXPECT_THAT(error("{type: segmentation, class_weights: [1, 2]}", Masks({})),
              HasSubstr("task.class_weights has 2 values, the data has 5 classes"));
}

}  // namespace
}  // namespace syncbn::train
