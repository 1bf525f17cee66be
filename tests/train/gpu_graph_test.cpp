// Run on a machine with GPUs: ctest -L gpu.
#include <ATen/Functions.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/error.h>
#include <syncbn/data/synthetic.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/models/weights.h>

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "dist/gpus.h"
#include "fake_cuda/counts.h"
#include "step/training_step.h"
#include "support/from_yaml.h"
#include "support/skip.h"
#include "support/thrown.h"

namespace syncbn::train {
namespace {

using fake_cuda::Count;

constexpr int kWarmUp = 11;
constexpr int kSteps = kWarmUp + 20;
constexpr int kSmallStep = 20;  // the last step of an epoch has a smaller batch
constexpr int64_t kBatch = 4;
constexpr int64_t kSide = 8;

struct Variant {
  const char* name;
  int ranks;
  models::Norm norm;
  const char* optimizer;
  const char* amp = "none";
  int64_t accumulate = 1;
  const char* on_nan = "stop";
  std::optional<double> clip = {};
};

const std::vector<Variant> kVariants = {
    {"SyncSgd", 1, models::Norm::kSync, "{type: sgd, momentum: 0.9, weight_decay: 1e-4}"},
    {"LocalAdamw", 1, models::Norm::kLocal, "{type: adamw}", "bf16", 1, "stop", 0.5},
    {"SyncScaled", 2, models::Norm::kSync, "{type: adam, layer_decay: 0.7}", "fp16", 2, "skip"},
};

data::Batch batch_of(int step, int rank) {
  const int64_t size = step == kSmallStep ? 3 : kBatch;
  const at::Tensor images = at::arange(size * kSide * kSide, at::kLong)
                                .mul(step * 7 + rank * 3 + 5)
                                .remainder(251)
                                .to(at::kByte)
                                .view({size, 1, kSide, kSide});
  return {.data = images.pin_memory(),
          .target = at::arange(size, at::kLong).add(step + rank).remainder(10).pin_memory()};
}

/// On the fake CUDA devices: the host does not wait for a step, the vote is one copy, and a graph
/// is one launch in addition to the kernel for the batch.
void expect_no_waits(const fake_cuda::Counts& counts, bool with_graph) {
  EXPECT_EQ(counts.host_waits(), 0U);
  EXPECT_EQ(counts[Count::kDeviceToHost], 1U);
  EXPECT_EQ(counts[Count::kGraphs], with_graph ? 1U : 0U);
  if (!with_graph) return;
  EXPECT_EQ(counts[Count::kKernels], 1U);
  EXPECT_EQ(counts[Count::kCollectives], 0U);
}

struct Trained {
  std::vector<at::Tensor> state;  ///< of the network and the optimizer
  std::vector<double> losses;
};

Trained train(const Variant& variant, bool with_graph, int rank) {
  const c10::impl::VirtualGuardImpl device(at::kCUDA);
  const c10::StreamGuard guard(device.getStreamFromGlobalPool(dist::device()));
  at::manual_seed(1);
  auto model = test::from_yaml<models::ModelKind>("{type: digits, width: 4}", "model")
                   .make(models::ModelArgs{
                       .num_classes = 10, .sample_shape = {1, kSide, kSide}, .norm = variant.norm});
  model->to(dist::device());
  const auto task = test::from_yaml<TaskKind>("{type: classification}", "task")
                        .make(*data::make_synthetic({.classes = 10}, data::Split::kTrain));
  task->attach(*model);
  Config config;
  config.optimizer = test::from_yaml<OptimizerKind>(variant.optimizer, "optimizer");
  config.amp = variant.amp;
  config.accumulate = variant.accumulate;
  config.on_nan = variant.on_nan;
  config.clip.norm = variant.clip;
  config.sync_batchnorm = variant.norm == models::Norm::kSync;
  config.cuda_graph = with_graph;
  const BatchToDevice to_device({.device = dist::device(),
                                 .pinned = true,
                                 .normalization = {{0.5}, {0.3}},
                                 .image_type = chosen_precision(config, dist::device())});
  TrainingStep step(config, *task, to_device, model);
  step.train();
  Trained trained;
  for (int i = 0; i < kSteps; ++i) {
    const data::Batch batch = batch_of(i, rank);
    const bool is_counted = fake_cuda::counters() != nullptr;
    const auto before = is_counted ? fake_cuda::counts() : fake_cuda::Counts();
    data::SampleRandom random(0, 0, i);
    const bool is_regular = i != kSmallStep;
    const auto former = step.run(batch, 0.05 / (1 + i), random, {}, is_regular);
    if (former) trained.losses.push_back(former->loss_sum);
    // libtorch waits for timers during the warm-up, and the first step after it captures.
    if (is_counted && i > kWarmUp) {
      SCOPED_TRACE(i);
      expect_no_waits(fake_cuda::counts() - before, with_graph && is_regular);
    }
  }
  trained.losses.push_back(step.finish().value().loss_sum);
  for (const auto& item : models::state_dict(*model)) trained.state.push_back(item.value().cpu());
  for (const auto& [name, tensors] : step.optimizer().state()) {
    for (const auto& [key, tensor] : tensors) trained.state.push_back(tensor.cpu());
  }
  trained.state.push_back(step.take_counts().cpu());
  return trained;
}

class GpuGraphTest : public ::testing::TestWithParam<Variant> {};

TEST_P(GpuGraphTest, StepsHaveTheBitsOfEagerOnes) {
  const Variant& variant = GetParam();
  SYNCBN_SKIP_UNLESS(test::gpus() >= variant.ranks, variant.ranks == 1 ? "gpu" : "two-gpus");
  test::run_ranks(variant.ranks, [&](int rank) {
    dist::init_process_group();
    const Trained eager = train(variant, /*with_graph=*/false, rank);
    const Trained captured = train(variant, /*with_graph=*/true, rank);
    EXPECT_EQ(captured.losses, eager.losses);
    ASSERT_EQ(captured.state.size(), eager.state.size());
    for (size_t i = 0; i < eager.state.size(); ++i) {
      EXPECT_TRUE(captured.state[i].equal(eager.state[i])) << i;
    }
    dist::destroy_process_group();
  });
}

/// The variants of kVariants, on two ranks instead of one and on one instead of two.
std::vector<Variant> others() {
  std::vector<Variant> all = kVariants;
  for (Variant& variant : all) variant.ranks = 3 - variant.ranks;
  return all;
}

std::string name_of(const ::testing::TestParamInfo<Variant>& info) {
  return info.param.name;
}
INSTANTIATE_TEST_SUITE_P(Variants, GpuGraphTest, ::testing::ValuesIn(kVariants), name_of);
INSTANTIATE_TEST_SUITE_P(Exhaustive, GpuGraphTest, ::testing::ValuesIn(others()), name_of);

struct Obstacle {
  const char* name;                  ///< its name in the message
  std::function<void(Config&)> set;  ///< the setting that makes a graph impossible
  bool sizes_vary = false;
  const char* task = "{type: classification}";
  const char* model = "{type: digits, width: 4}";
};

const std::vector<Obstacle> kObstacles = {
    {"backend gloo, which exchanges", [](Config& config) { config.backend = "gloo"; }},
    {"parallel.mode data_parallel", [](Config& config) { config.parallel.mode = "data_parallel"; }},
    {"images of different sizes", [](Config&) {}, /*sizes_vary=*/true},
    {"loader.on_error skip", [](Config& config) { config.loader.on_error = "skip"; }},
    {"a task that trains parts of the network in turn", [](Config&) {}, false, "{type: gan}",
     "{type: dcgan, latent_size: 3, generator_width: 3, discriminator_width: 3}"},
    {"activation_checkpointing", [](Config& config) { config.activation_checkpointing = true; }},
    {"ddp.find_unused_parameters",
     [](Config& config) { config.ddp.find_unused_parameters = true; }},
    {"ddp.comm_hook", [](Config& config) { config.ddp.comm_hook = "fp16"; }},
    {"this optimizer without fused operators",
     [](Config& config) {
       config.optimizer = test::from_yaml<OptimizerKind>("{type: lamb}", "optimizer");
     }},
};

/// The reason why a configuration cannot use a graph on this rank's device; empty if it can.
std::string refusal_of(const Obstacle& obstacle, bool wants_graph) {
  auto model = test::from_yaml<models::ModelKind>(obstacle.model, "model")
                   .make(models::ModelArgs{.num_classes = 10, .sample_shape = {1, kSide, kSide}});
  model->to(dist::device());
  const auto set = data::make_synthetic(
      {.channels = 1, .height = kSide, .width = kSide, .classes = 10}, data::Split::kTrain);
  const auto task = test::from_yaml<TaskKind>(obstacle.task, "task").make(*set);
  task->attach(*model);
  Config config;
  config.cuda_graph = wants_graph;
  obstacle.set(config);
  const BatchToDevice to_device({.device = dist::device(), .normalization = {{0.5}, {0.3}}});
  const TrainingStep step(config, *task, to_device, model);
  try {
    step.check_graph(obstacle.sizes_vary);
  } catch (const base::UserError& error) {
    return error.what();
  }
  return "";
}

TEST(GpuGraphObstaclesTest, AreRefusedByName) {
  SYNCBN_SKIP_UNLESS(test::gpus() > 0, "gpu");
  const auto says = [](const char* obstacle) {
    return ::testing::StartsWith(
        fmt::format("cuda_graph: a graph cannot repeat steps with {}", obstacle));
  };
  test::run_ranks(1, [&](int) {
    dist::init_process_group();
    EXPECT_EQ(refusal_of({"", [](Config&) {}}, true), "");
    for (const Obstacle& obstacle : kObstacles) {
      EXPECT_THAT(refusal_of(obstacle, true), says(obstacle.name));
      EXPECT_EQ(refusal_of(obstacle, false), "") << obstacle.name;
    }
    dist::destroy_process_group();
    dist::init_process_group({.backend = "gloo"});
    EXPECT_THAT(refusal_of({"", [](Config&) {}}, true), says("tensors on the CPU"));
  });
}

/// A task, as in a plug-in, that reads the loss in each step.
class ReadingTask : public Task {
 public:
  at::Tensor loss(const Outputs& outputs, const at::Tensor& /*target*/) const override {
    const at::Tensor loss = outputs.front().square().mean();
    EXPECT_GE(loss.item<float>(), 0);
    return loss;
  }
  at::Tensor loss_sum(const Outputs& outputs, const at::Tensor& target) const override {
    return loss(outputs, target);
  }
  at::Tensor counts(const Outputs& outputs, const at::Tensor& /*target*/) const override {
    return at::zeros({0}, outputs.front().options().dtype(at::kLong));
  }
  int64_t num_counts() const override { return 0; }
  std::vector<Metric> metrics(std::span<const int64_t> /*counts*/,
                              std::span<const int64_t> /*records*/) const override {
    return {};
  }
};

TEST(GpuGraphObstaclesTest, AStepThatReadsTheDeviceIsRefusedWithAdvice) {
  SYNCBN_SKIP_UNLESS(test::gpus() > 0, "gpu");
  test::run_ranks(1, [](int) {
    dist::init_process_group();
    const c10::impl::VirtualGuardImpl device(at::kCUDA);
    const c10::StreamGuard guard(device.getStreamFromGlobalPool(dist::device()));
    auto model = test::from_yaml<models::ModelKind>("{type: digits, width: 4}", "model")
                     .make(models::ModelArgs{.num_classes = 10, .sample_shape = {1, kSide, kSide}});
    model->to(dist::device());
    const ReadingTask task;
    Config config;
    config.model = test::from_yaml<models::ModelKind>("digits", "model");
    config.cuda_graph = true;
    const BatchToDevice to_device({.device = dist::device(), .normalization = {{0.5}, {0.3}}});
    TrainingStep step(config, task, to_device, model);
    step.train();
    const auto run = [&](int i) {
      data::SampleRandom random(0, 0, i);
      step.run(batch_of(i, 0), 0.01, random, {});
    };
    for (int i = 0; i < kWarmUp; ++i) run(i);
    EXPECT_THAT(
        test::message_of<base::UserError>([&] { run(kWarmUp); }),
        ::testing::AllOf(::testing::StartsWith("cuda_graph: this step cannot be captured ("),
                         ::testing::EndsWith("); set cuda_graph to false")));
  });
}

}  // namespace
}  // namespace syncbn::train
