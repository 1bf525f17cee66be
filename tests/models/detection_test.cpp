// What detectors make of their predictions, against torchvision. torchvision_test.cpp compares the
// networks themselves.
#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/ddp.h>
#include <syncbn/models/detector.h>
#include <syncbn/models/resnet.h>
#include <syncbn/models/weights.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "detection/box_ops.h"
#include "support/from_yaml.h"
#include "support/multiproc.h"
#include "support/program.h"
#include "support/python.h"
#include "support/skip.h"
#include "support/temp_folder.h"

namespace syncbn::models {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr int64_t kClasses = 5;
constexpr size_t kLevels = 5;

std::shared_ptr<Detector> make_detector(const std::string& yaml, ModelArgs args = {}) {
  args.num_classes = kClasses;
  args.sample_shape = {3, 64, 64};
  at::manual_seed(0);
  auto detector =
      std::dynamic_pointer_cast<Detector>(test::from_yaml<ModelKind>(yaml, "model").make(args));
  EXPECT_NE(detector, nullptr) << yaml << " finds no boxes";
  return detector;
}

at::Tensor random_images(int64_t count, int64_t height, int64_t width) {
  at::manual_seed(1);
  return at::randn({count, 3, height, width}, at::kDouble);
}

/// The target of two images, of which the first has two boxes.
at::Tensor small_target() {
  at::Tensor target = at::full({2, 3, 5}, -1., at::kDouble);
  target[0] = at::tensor({0., 96., 96., 96., 96., 1., 5., 10., 60., 70., 4., 30., 20., 90., 50.},
                         at::kDouble)
                  .reshape({3, 5});
  return target;
}

struct Network {
  std::string name;
  std::string options;  ///< the options that are not the defaults, as in detection_reference.py
};

const std::vector<Network>& networks() {
  const std::string limits =
      "score_thresh: 0.3, nms_thresh: 0.4, detections_per_img: 7, topk_candidates: 20";
  static const std::vector<Network> all = {
      {"retinanet_resnet50_fpn", limits + ", fg_iou_thresh: 0.6, bg_iou_thresh: 0.3"},
      {"retinanet_resnet50_fpn_v2", limits + ", fg_iou_thresh: 0.6, bg_iou_thresh: 0.3"},
      {"fcos_resnet50_fpn", limits + ", center_sampling_radius: 0.9"}};
  return all;
}

/// The smallest of each kind.
constexpr const char* kOneOfEachKind[] = {"retinanet_resnet18_fpn", "retinanet_resnet50_fpn_v2",
                                          "fcos_resnet50_fpn"};

class DetectionReferenceTest : public ::testing::Test {
 protected:
  void SetUp() override { SYNCBN_SKIP_UNLESS(test::python_has("torchvision"), "torchvision"); }

  /// @param part nms or networks
  void make_reference(const std::string& part) {
    const std::string file = folder_ / "reference.pt";
    const auto ended = test::run_program(
        {test::python(), SYNCBN_SOURCE_DIR "/tests/models/detection_reference.py", part, file});
    ASSERT_EQ(ended.exit_code, 0) << ended.err;
    saved_ = read_state_dict(file);
  }

  /// The random predictions, with the anchors of the network.
  std::vector<at::Tensor> outputs_of(Detector& detector, const std::string& prefix) {
    const at::NoGradGuard no_grad;
    detector.eval();
    std::vector<at::Tensor> outputs = detector.forward_all(at::zeros({2, 3, 128, 224}));
    const std::vector<std::string> names = {"cls_logits", "bbox_regression", "bbox_ctrness"};
    for (size_t i = 0; i + kLevels < outputs.size(); ++i) {
      EXPECT_EQ(outputs[i].sizes(), saved_[prefix + names[i]].sizes());
      outputs[i] = saved_[prefix + names[i]];
    }
    return outputs;
  }

  test::TempFolder folder_;
  StateDict saved_;
};

TEST_F(DetectionReferenceTest, AnchorsDetectionsLossAndGradientsAreThoseOfTorchvision) {
  ASSERT_NO_FATAL_FAILURE(make_reference("networks"));
  for (const Network& network : networks()) {
    for (const bool is_default : {true, false}) {
      const std::string prefix = network.name + (is_default ? ".defaults." : ".options.");
      SCOPED_TRACE(prefix);
      const auto detector = make_detector(
          is_default ? network.name
                     : fmt::format("{{type: {}, {}}}", network.name, network.options));
      std::vector<at::Tensor> outputs = outputs_of(*detector, prefix);
      const auto anchors = outputs.end() - kLevels;
      EXPECT_TRUE(at::cat(std::vector<at::Tensor>(anchors, outputs.end()))
                      .equal(saved_[prefix + "anchors"]));

      const std::vector<Detections> found = detector->detect(outputs, saved_["sizes"]);
      ASSERT_EQ(found.size(), 2U);
      for (size_t i = 0; i < found.size(); ++i) {
        SCOPED_TRACE(i);
        EXPECT_GT(found[i].scores.size(0), 3);
        EXPECT_TRUE(found[i].scores.equal(saved_[fmt::format("{}scores.{}", prefix, i)]));
        EXPECT_TRUE(found[i].labels.equal(saved_[fmt::format("{}labels.{}", prefix, i)]));
        EXPECT_TRUE(found[i].boxes.equal(saved_[fmt::format("{}boxes.{}", prefix, i)]));
      }

      for (at::Tensor& output : outputs) output = output.to(at::kDouble);
      const std::vector<at::Tensor> predictions(outputs.begin(), anchors);
      for (const at::Tensor& prediction : predictions) prediction.set_requires_grad(true);
      const at::Tensor loss = detector->loss(outputs, saved_["target"]);
      loss.backward();
      const auto expected = saved_[prefix + "loss"].item<double>();
      EXPECT_NEAR(loss.item<double>(), expected, 1e-12 * expected);
      const std::vector<std::string> names = {"cls_logits", "bbox_regression", "bbox_ctrness"};
      for (size_t i = 0; i < predictions.size(); ++i) {
        EXPECT_TRUE(
            at::allclose(predictions[i].grad(), saved_[prefix + names[i] + ".grad"], 1e-9, 1e-15))
            << names[i];
      }
    }
  }
}

TEST_F(DetectionReferenceTest, NmsKeepsWhatTorchvisionKeeps) {
  ASSERT_NO_FATAL_FAILURE(make_reference("nms"));
  for (const char* number : {"0", "1", "2"}) {
    const std::string prefix = fmt::format("nms.{}.", number);
    const auto kept = [&](int64_t limit) {
      return nms(saved_[prefix + "boxes"], saved_[prefix + "scores"], saved_[prefix + "labels"],
                 saved_[prefix + "threshold"].item<double>(), limit);
    };
    const at::Tensor& expected = saved_[prefix + "kept"];
    EXPECT_TRUE(kept(10'000).equal(expected)) << number;
    EXPECT_TRUE(kept(5).equal(expected.slice(0, 0, 5))) << number;
  }
}

TEST(DetectorTest, NmsOfNoBoxesKeepsNone) {
  const at::Tensor none = at::empty({0}, at::kLong);
  EXPECT_EQ(nms(at::empty({0, 4}), at::empty({0}), none, 0.5, 10).sizes(), none.sizes());
}

TEST(DetectorTest, ImagesWithoutAnythingAboveTheThresholdHaveNoDetections) {
  const at::NoGradGuard no_grad;
  for (const char* network : kOneOfEachKind) {
    const auto detector = make_detector(network);  // initial scores are about 0.01
    detector->eval();
    const auto outputs = detector->forward_all(at::zeros({1, 3, 64, 64}));
    const auto found = detector->detect(outputs, at::tensor({64, 64}).reshape({1, 2}));
    EXPECT_EQ(found.at(0).boxes.sizes(), (std::vector<int64_t>{0, 4}));
    EXPECT_EQ(found.at(0).labels.scalar_type(), at::kLong);
  }
}

// On GPUs images are bf16 by default, with 8 significant bits: 300 pixels would be 302 or 296.
TEST(DetectorTest, AnchorsOfImagesIn16BitsAreNotRounded) {
  const at::NoGradGuard no_grad;
  const auto detector = make_detector("retinanet_resnet18_fpn");
  const auto anchors_of = [&](at::ScalarType type) {
    detector->to(type);
    const auto outputs = detector->forward_all(at::zeros({1, 3, 64, 544}, type));
    return std::vector<at::Tensor>(outputs.end() - kLevels, outputs.end());
  };
  const auto expected = anchors_of(at::kFloat);
  const auto found = anchors_of(at::kBFloat16);
  for (size_t level = 0; level < kLevels; ++level) {
    EXPECT_TRUE(found[level].equal(expected[level])) << level;
  }
}

TEST(DetectorGradientsTest, BatchesWithoutBoxesHaveFiniteGradientsForAllParameters) {
  for (const char* network : kOneOfEachKind) {
    const auto detector = make_detector(network);
    detector->to(at::kDouble);
    const auto outputs = detector->forward_all(random_images(2, 96, 96));
    std::vector<at::Tensor> losses;
    // No rows, or only padding rows, whose numbers must not matter.
    losses.push_back(detector->loss(outputs, at::zeros({2, 1, 5}, at::kDouble)));
    losses.push_back(detector->loss(outputs, at::full({2, 3, 5}, -1., at::kDouble)));
    EXPECT_EQ(losses[0].item<double>(), losses[1].item<double>());
    losses[1].backward();
    for (const auto& item : detector->named_parameters()) {
      const at::Tensor& gradient = item.value().grad();
      ASSERT_TRUE(gradient.defined()) << item.key();
      EXPECT_TRUE(gradient.isfinite().all().item<bool>()) << item.key();
    }
  }
}

TEST(DetectorTest, HeadsHaveTheirNormalization) {
  struct Case {
    std::string yaml;
    std::vector<std::string> names;  ///< parameters of the first layer of a head
  };
  const std::string retinanet = "{type: retinanet_resnet18_fpn, head_norm: ";
  const std::string fcos = "{type: fcos_resnet50_fpn, head_norm: ";
  const std::vector<Case> cases = {
      {retinanet + "none}", {"0.0.weight", "0.0.bias"}},
      {retinanet + "group}", {"0.0.weight", "0.1.weight", "0.1.bias"}},
      {retinanet + "batch}",
       {"0.0.weight", "0.1.weight", "0.1.bias", "0.1.running_mean", "0.1.running_var",
        "0.1.num_batches_tracked"}},
      {fcos + "none}", {"0.weight", "0.bias"}},
      {fcos + "batch}",
       {"0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var",
        "1.num_batches_tracked"}},
  };
  for (const Case& each : cases) {
    const auto detector = make_detector(each.yaml);
    const std::string prefix = "head.classification_head.conv.";
    std::vector<std::string> names;
    for (const auto& item : state_dict(*detector)) {
      if (!item.key().starts_with(prefix)) continue;
      if (names.size() < each.names.size()) names.push_back(item.key().substr(prefix.size()));
    }
    EXPECT_EQ(names, each.names) << each.yaml;
    detector->to(at::kDouble);
    const auto outputs = detector->forward_all(random_images(2, 96, 96));
    EXPECT_TRUE(detector->loss(outputs, small_target()).isfinite().item<bool>()) << each.yaml;
  }
}

/// The weights under the names in torchvision's published files.
StateDict with_old_names(const StateDict& weights) {
  StateDict old;
  for (const auto& item : weights) {
    std::string name = item.key();
    for (const int i : {0, 1, 2, 3}) {
      for (const auto& [part, number] :
           {std::pair("_blocks.", i), std::pair("_head.conv.", 2 * i)}) {
        const std::string present = fmt::format("{}{}.0.", part, i);
        const size_t begin = name.find(present);
        if (begin == std::string::npos) continue;
        name.replace(begin, present.size(), fmt::format("{}{}.", part, number));
        break;
      }
    }
    // The published networks have FrozenBatchNorm2d, without this buffer.
    if (!name.ends_with("num_batches_tracked")) old.insert(name, item.value());
  }
  return old;
}

TEST(DetectorTest, WeightsWithTorchvisionsOldNamesAreLoaded) {
  const auto saved = make_detector("retinanet_resnet50_fpn");
  const StateDict old = with_old_names(state_dict(*saved));
  for (const char* name :
       {"backbone.fpn.inner_blocks.2.bias", "backbone.fpn.layer_blocks.0.weight",
        "head.classification_head.conv.6.weight", "head.regression_head.conv.2.bias"}) {
    ASSERT_TRUE(old.contains(name)) << name;
  }
  const auto loaded = make_detector("retinanet_resnet50_fpn");
  {
    const at::NoGradGuard no_grad;
    for (at::Tensor& parameter : loaded->parameters()) parameter.zero_();
  }
  load_state_dict(*loaded, old);
  const auto parameters = saved->named_parameters();
  for (const auto& item : loaded->named_parameters()) {
    EXPECT_TRUE(item.value().equal(parameters[item.key()])) << item.key();
  }
}

TEST(DetectorTest, TheBackboneTakesTheWeightsOfAClassifier) {
  const auto detector = make_detector("fcos_resnet50_fpn");
  at::manual_seed(2);
  const auto classifier = resnet50();
  const auto report =
      load_state_dict(*detector, state_dict(*classifier), {.into = "backbone.body"});
  EXPECT_THAT(report.unexpected, ElementsAre("fc.weight", "fc.bias"));
  EXPECT_TRUE(report.missing.empty());
  const StateDict loaded = state_dict(*detector);
  for (const auto& item : state_dict(*classifier)) {
    if (item.key().starts_with("fc.")) continue;
    EXPECT_TRUE(item.value().equal(loaded["backbone.body." + item.key()])) << item.key();
  }
  EXPECT_THAT([&] { load_state_dict(*detector, StateDict(), {.into = "backbone.bdy"}); },
              ThrowsMessage<base::UserError>(HasSubstr("the network has no part 'backbone.bdy'")));
  EXPECT_THAT([&] { load_state_dict(*detector, StateDict(), {.into = "backbone.body"}); },
              ThrowsMessage<base::UserError>(HasSubstr("missing: conv1.weight")));
}

TEST(DetectorTest, ThresholdsInTheWrongOrderAreRefused) {
  EXPECT_THAT([] { make_detector("{type: retinanet_resnet50_fpn, bg_iou_thresh: 0.6}"); },
              ThrowsMessage<base::UserError>(
                  HasSubstr("bg_iou_thresh (0.6) is above fg_iou_thresh (0.5)")));
}

/// One image per rank with SyncBatchNorm, against both images in one network. The loss is a mean
/// over images, so the mean of the ranks' losses is the loss of the whole batch.
void expect_whole_batch(int rank, const std::string& yaml) {
  const auto make = [&](Norm norm) {
    auto detector = make_detector(yaml, {.norm = norm});
    detector->to(at::kDouble);
    return detector;
  };
  const at::Tensor images = random_images(2, 96, 96);
  const at::Tensor target = small_target();
  const auto whole = make(Norm::kLocal);
  const auto expected = whole->forward_all(images);
  whole->loss(expected, target).backward();

  const auto mine = [rank](const at::Tensor& all) { return all.slice(0, rank, rank + 1); };
  const auto shared = make(Norm::kSync);
  dist::DistributedDataParallel<Model> ddp(shared);
  const auto outputs = ddp.invoke(&Model::forward_all, mine(images));
  shared->loss(outputs, mine(target)).backward();
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_TRUE(at::allclose(outputs[i], mine(expected[i]), 1e-9, 1e-9)) << i;
  }
  // Some gradients are zero except for rounding: those of a bias before batch norm.
  double largest = 0;
  for (const at::Tensor& parameter : whole->parameters()) {
    largest = std::max(largest, parameter.grad().abs().max().item<double>());
  }
  const auto parameters = whole->named_parameters();
  for (const auto& item : shared->named_parameters()) {
    EXPECT_TRUE(at::allclose(item.value().grad(), parameters[item.key()].grad(), /*rtol=*/0,
                             1e-9 * largest))
        << item.key();
  }
}

TEST(DetectorTest, TwoRanksWithSyncBatchNormComputeTheWholeBatch) {
  for (const std::string head_norm : {"none", "batch"}) {
    const std::string yaml =
        fmt::format("{{type: retinanet_resnet18_fpn, head_norm: {}}}", head_norm);
    test::run_ranks(2, [&](int rank) {
      at::set_num_threads(1);
      dist::init_process_group();
      expect_whole_batch(rank, yaml);
    });
  }
}

}  // namespace
}  // namespace syncbn::models
