// What the tasks' steps and an evaluation ask of a GPU, and which settings a network sees there.
// Run on a machine with GPUs: ctest -L gpu; only the fake CUDA devices count.
#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <syncbn/data/boxes.h>
#include <syncbn/data/synthetic.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/models/model.h>
#include <syncbn/train/command.h>
#include <torch/nn/modules/conv.h>

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "dist/gpus.h"
#include "evaluation.h"
#include "fake_cuda/counts.h"
#include "step/training_step.h"
#include "support/from_yaml.h"
#include "support/skip.h"
#include "support/temp_folder.h"

namespace syncbn::train {
namespace {

constexpr int kTimedSteps = 10;  // steps in which libtorch's Logger waits for timers
constexpr int64_t kImages = 2;   // in a batch
constexpr int64_t kPixels = 32;  // side of an image

/// Colour images of bytes. No test decodes them.
template <class Base>
class Photos : public Base {
 public:
  int64_t size() const override { return 8; }
  std::span<const int64_t> labels() const override { return {}; }
  int64_t num_classes() const override { return 4; }
  std::vector<int64_t> sample_shape() const override { return {3, kPixels, kPixels}; }
  uint64_t fingerprint() const override { return 1; }
  void read_sample(int64_t index, data::SampleRandom& /*random*/,
                   const data::SampleSlot& slot) const override {
    for (size_t i = 0; i < slot.data.size(); ++i) {
      slot.data[i] = static_cast<uint8_t>(i * 7 + static_cast<size_t>(index) * 31);
    }
    slot.target[0] = index % num_classes();
  }
};

class PhotosWithMasks : public Photos<data::SampleDataset> {
 public:
  std::vector<int64_t> target_shape() const override { return {kPixels, kPixels}; }
};

class PhotosWithBoxes : public Photos<data::BoxDataset> {
 public:
  std::vector<int64_t> target_shape() const override { return {2, data::BoxTarget::kColumns}; }
  std::span<const data::Annotation> annotations(int64_t /*index*/) const override { return {}; }
  int64_t image_id(int64_t index) const override { return index; }
  int64_t category_id(int64_t label) const override { return label; }
  data::ImageSize original_size(int64_t /*index*/) const override {
    return {.width = kPixels, .height = kPixels};
  }
};

at::Tensor image_labels() {
  return at::arange(kImages, at::kLong);
}

at::Tensor pixel_labels() {
  return at::arange(kImages * kPixels * kPixels, at::kLong)
      .remainder(4)
      .view({kImages, kPixels, kPixels});
}

/// One box in each image.
at::Tensor boxes() {
  const double side = kPixels;
  return at::tensor({0., side, side, side, side, 1., 4., 4., 20., 22.}, at::kDouble)
      .view({1, 2, data::BoxTarget::kColumns})
      .repeat({kImages, 1, 1})
      .view(at::kLong);
}

struct TaskCase {
  const char* name;
  const char* task;
  const char* model;
  std::function<std::unique_ptr<data::Dataset>()> data;
  std::function<at::Tensor()> target;
};

template <class Set>
std::unique_ptr<data::Dataset> made() {
  return std::make_unique<Set>();
}

const std::vector<TaskCase> kTaskCases = {
    {"classification",
     "{type: classification, mixup: 0.2, cutmix: 1, label_smoothing: 0.1, class_weights: [1, 0, "
     "2, 3]}",
     "{type: digits, width: 4}", made<Photos<data::SampleDataset>>, image_labels},
    {"segmentation", "{type: segmentation, class_weights: [1, 0, 2, 3]}", "{type: unet, width: 4}",
     made<PhotosWithMasks>, pixel_labels},
    {"gan", "{type: gan}",
     "{type: dcgan, latent_size: 3, generator_width: 3, discriminator_width: 3}",
     made<Photos<data::SampleDataset>>, image_labels},
};

const TaskCase kDetectionCase = {"detection", "{type: detection}", "{type: retinanet_resnet18_fpn}",
                                 made<PhotosWithBoxes>, boxes};

std::shared_ptr<models::Model> model_for(const std::string& yaml, const data::Dataset& set,
                                         models::Norm norm = models::Norm::kLocal) {
  auto model =
      test::from_yaml<models::ModelKind>(yaml, "model")
          .make(models::ModelArgs{
              .num_classes = set.num_classes(), .sample_shape = set.sample_shape(), .norm = norm});
  model->to(dist::device());
  return model;
}

/// @param replicas number of this rank's replicas, each on its own GPU; 1: no replicas
void expect_steps_without_waits(const TaskCase& c, int replicas = 1) {
  const auto set = c.data();
  // Replicas synchronise in the layers.
  const bool syncs = replicas > 1;
  const auto model = model_for(c.model, *set, syncs ? models::Norm::kSync : models::Norm::kLocal);
  const auto task = test::from_yaml<TaskKind>(c.task, "task").make(*set);
  task->attach(*model);
  Config config;
  config.sync_batchnorm = syncs;
  config.amp = "none";  // bf16 takes a minute on CPUs, which the fake CUDA devices use
  config.clip.norm = 1;
  config.model = test::from_yaml<models::ModelKind>(c.model, "model");
  if (replicas > 1) config.parallel.mode = "data_parallel";
  for (int i = 0; i < replicas; ++i) {
    config.parallel.devices.push_back(fmt::format("cuda:{}", i));
  }
  const BatchToDevice to_device = batch_to_device(config, *model, *set, /*pinned=*/true);
  TrainingStep step(config, *task, to_device, model, make_replicas(config, *set, *task, model));
  step.train();
  data::Batch batch{.data = at::arange(kImages * 3 * kPixels * kPixels, at::kLong)
                                .remainder(251)
                                .to(at::kByte)
                                .view({kImages, 3, kPixels, kPixels})
                                .pin_memory(),
                    .target = c.target().pin_memory()};
  for (int64_t i = 0; i < kImages; ++i) batch.randoms.emplace_back(0, 0, i);
  for (int i = 0; i < kTimedSteps + 3; ++i) {
    data::SampleRandom random(0, 0, i);
    const fake_cuda::Counts before = fake_cuda::counts();
    step.run(batch, 1e-4, random, {});
    const fake_cuda::Counts counts = fake_cuda::counts() - before;
    if (i <= kTimedSteps) continue;
    EXPECT_EQ(counts.host_waits(), 0U) << "step " << i;
    EXPECT_EQ(counts[fake_cuda::Count::kDeviceToHost], 1U) << "step " << i;  // the vote
  }
  EXPECT_TRUE(step.finish().value().is_finite());
}

class GpuTaskStepsTest : public ::testing::TestWithParam<TaskCase> {};

TEST_P(GpuTaskStepsTest, WaitForNothing) {
  SYNCBN_SKIP_UNLESS(test::gpus() > 0, "gpu");
  SYNCBN_SKIP_UNLESS(fake_cuda::counters() != nullptr, "fake-cuda");
  test::run_ranks(1, [](int) {
    dist::init_process_group();
    expect_steps_without_waits(GetParam());
    dist::destroy_process_group();
  });
}

std::string name_of_case(const ::testing::TestParamInfo<TaskCase>& info) {
  return info.param.name;
}

INSTANTIATE_TEST_SUITE_P(Tasks, GpuTaskStepsTest, ::testing::ValuesIn(kTaskCases), name_of_case);
// These take ten seconds.
INSTANTIATE_TEST_SUITE_P(Exhaustive, GpuTaskStepsTest, ::testing::Values(kDetectionCase),
                         name_of_case);

TEST(GpuStepsTest, ThoseOfReplicasOnTwoGpusWaitForNothing) {
  SYNCBN_SKIP_UNLESS(test::gpus() > 1, "two-gpus");
  SYNCBN_SKIP_UNLESS(fake_cuda::counters() != nullptr, "fake-cuda");
  test::run_ranks(1, [](int) {
    dist::init_process_group();
    expect_steps_without_waits(kTaskCases.front(), 2);
    dist::destroy_process_group();
  });
}

/// What an evaluation with this batch size asks of the GPU.
fake_cuda::Counts counts_of_evaluation(int64_t batch_size) {
  const std::shared_ptr<const data::Dataset> set = data::make_synthetic(
      {.test_size = 24, .channels = 1, .height = 8, .width = 8, .classes = 4}, data::Split::kTest);
  Config config;
  config.sync_batchnorm = false;
  Inputs inputs;
  inputs.train_set = inputs.eval_set = set;
  const auto model = model_for("{type: digits, width: 4}", *set);
  const BatchToDevice to_device = batch_to_device(config, *model, *set, /*pinned=*/true);
  data::LoaderOptions options = config.loader.options(batch_size, dist::device());
  options.num_workers = 0;
  const Evaluator evaluator(config, inputs, *model, to_device, options);
  const GetWishes none = [] { return Wishes{}; };
  const fake_cuda::Counts before = fake_cuda::counts();
  prepare_statistics(config, inputs, evaluator.task(), *model, to_device, options, 0, none);
  const fake_cuda::Counts prepared = fake_cuda::counts() - before;
  EXPECT_EQ(prepared[fake_cuda::Count::kCollectives], 1U);  // a broadcast
  EXPECT_EQ(prepared.host_waits(), 0U);
  const Evaluation evaluation = evaluator.evaluate(none, [](int64_t, int64_t) {});
  EXPECT_EQ(evaluation.samples, 24);
  return fake_cuda::counts() - before;
}

TEST(GpuStepsTest, AnEvaluationReadsOnceForAnyNumberOfBatches) {
  SYNCBN_SKIP_UNLESS(test::gpus() > 1, "two-gpus");
  SYNCBN_SKIP_UNLESS(fake_cuda::counters() != nullptr, "fake-cuda");
  test::run_ranks(2, [](int) {
    dist::init_process_group();
    for (const int64_t batch_size : {12, 2}) {
      SCOPED_TRACE(batch_size);
      const fake_cuda::Counts counts = counts_of_evaluation(batch_size);
      // The broadcast and the sum over the ranks.
      EXPECT_EQ(counts[fake_cuda::Count::kCollectives], 2U);
      // One copy: the sums of all ranks, this rank's confusion matrix and its mistakes.
      EXPECT_EQ(counts[fake_cuda::Count::kDeviceToHost], 1U);
      EXPECT_EQ(counts[fake_cuda::Count::kStreamWaits], 1U);
    }
    dist::destroy_process_group();
  });
}

/// What a network sees in the last forward pass of its training.
struct Seen {
  std::optional<at::ScalarType> autocast = {};
  at::ScalarType input = at::kFloat;
  bool are_channels_last = false;  ///< both input and weights
  bool has_benchmark = false;
  bool is_reproducible = false;
};

class Witness : public models::Model {
 public:
  Witness(Seen& seen, int64_t classes) : seen_(seen) {
    conv_ = register_module("conv", torch::nn::Conv2d(3, classes, 3));
  }

  at::Tensor forward(at::Tensor images) override {
    const auto device = images.device().type();
    seen_ = {.input = images.scalar_type(),
             .are_channels_last = images.is_contiguous(at::MemoryFormat::ChannelsLast) &&
                                  conv_->weight.is_contiguous(at::MemoryFormat::ChannelsLast),
             .has_benchmark = at::globalContext().benchmarkCuDNN(),
             .is_reproducible = at::globalContext().deterministicCuDNN()};
    if (at::autocast::is_autocast_enabled(device)) {
      seen_.autocast = at::autocast::get_autocast_dtype(device);
    }
    return conv_(images).mean({2, 3});
  }

 private:
  Seen& seen_;
  torch::nn::Conv2d conv_{nullptr};
};

struct NoOptions {
  static void describe(config::Schema<NoOptions>& /*schema*/) {}
};

/// Trains a Witness on photos for one step.
Seen seen_in_training(const std::vector<std::string>& more) {
  const test::TempFolder folder;
  Seen seen;
  folder.write("run.yaml",
               "epochs: 1\nmax_steps: 1\nbatch_size: 4\nthreads: 1\n"
               "model: witness\ndata: photos\n");
  std::vector<std::string> args = {"--config=" + (folder / "run.yaml").string(),
                                   "--run_dir=" + (folder / "run").string()};
  args.insert(args.end(), more.begin(), more.end());
  const int code = run_command(args, [&] {
    models::ModelKind::registry().add<NoOptions>(
        "witness", "tells what it sees", [&](const NoOptions&, const models::ModelArgs& model) {
          return std::make_shared<Witness>(seen, model.num_classes);
        });
    data::DatasetKind::registry().add<NoOptions>(
        "photos", "colours", [](const NoOptions&, data::Split split) {
          return split == data::Split::kVal ? nullptr
                                            : std::make_shared<const Photos<data::SampleDataset>>();
        });
  });
  EXPECT_EQ(code, 0);
  return seen;
}

TEST(GpuStepsTest, ByDefaultANetworkGetsBf16AndChannelsLastFromPinnedMemory) {
  SYNCBN_SKIP_UNLESS(test::gpus() > 0, "gpu");
  test::run_ranks(1, [](int) {
    const Seen seen = seen_in_training({});
    EXPECT_EQ(seen.autocast, at::kBFloat16);
    EXPECT_EQ(seen.input, at::kBFloat16);
    EXPECT_TRUE(seen.are_channels_last);
    EXPECT_TRUE(seen.has_benchmark);
    EXPECT_TRUE(LoaderConfig().options(1, at::kCUDA).pin_memory);
    EXPECT_FALSE(LoaderConfig().options(1, at::kCPU).pin_memory);
  });
  test::run_ranks(1, [](int) {
    const Seen seen = seen_in_training({"--amp=none", "--deterministic"});
    EXPECT_EQ(seen.autocast, std::nullopt);
    EXPECT_EQ(seen.input, at::kFloat);
    EXPECT_FALSE(seen.has_benchmark);
    EXPECT_TRUE(seen.is_reproducible);
  });
}

}  // namespace
}  // namespace syncbn::train
