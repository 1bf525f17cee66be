#include <ATen/Functions.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <syncbn/data/synthetic.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/models/gan.h>
#include <syncbn/models/weights.h>
#include <syncbn/train/task.h>

#include "step/training_step.h"
#include "support/from_yaml.h"
#include "support/multiproc.h"

namespace syncbn::train {
namespace {

constexpr int64_t kSide = 16;
constexpr int64_t kBatch = 8;  // on all ranks together
constexpr int kSteps = 6;
constexpr double kRate = 0.05;
constexpr double kSmoothing = 0.1;

std::shared_ptr<models::Model> network(models::Norm norm) {
  at::manual_seed(1);
  models::ModelArgs args;
  args.sample_shape = {3, kSide, kSide};
  args.norm = norm;
  auto model =
      test::from_yaml<models::ModelKind>(
          "{type: dcgan, latent_size: 6, generator_width: 4, discriminator_width: 3}", "model")
          .make(args);
  model->to(at::kDouble);
  return model;
}

/// The batch of a step: images, with a stream of random numbers for each.
data::Batch batch_of(int step) {
  data::Batch batch{
      at::sin(at::arange(kBatch * 3 * kSide * kSide, at::kDouble) * (0.37 + 0.01 * step))
          .reshape({kBatch, 3, kSide, kSide}),
      at::zeros({kBatch}, at::kLong)};
  for (int64_t i = 0; i < kBatch; ++i) batch.randoms.emplace_back(7, step, i);
  return batch;
}

data::Batch part_of(const data::Batch& batch, int rank, int ranks) {
  const int64_t size = kBatch / ranks;
  const auto first = batch.randoms.begin() + rank * size;
  return {.data = batch.data.narrow(0, rank * size, size),
          .target = batch.target.narrow(0, rank * size, size),
          .randoms = {first, first + size}};
}

/// The steps of PyTorch's example, on the whole batch and with plain batch norm.
models::StateDict by_hand() {
  const auto model = network(models::Norm::kLocal);
  auto& gan = dynamic_cast<models::Gan&>(*model);
  gan.train();
  const auto bce = [](const at::Tensor& logits, double target) {
    return at::binary_cross_entropy_with_logits(logits, at::full_like(logits, target));
  };
  const auto update = [&](const std::string& part) {
    const at::NoGradGuard no_grad;
    for (const auto& item : gan.named_parameters()) {
      at::Tensor parameter = item.value();
      if (item.key().starts_with(part)) parameter.sub_(parameter.grad(), kRate);
      parameter.mutable_grad().reset();
    }
  };
  for (int step = 0; step < kSteps; ++step) {
    const data::Batch batch = batch_of(step);
    at::Tensor noise = at::empty({kBatch, gan.latent_size()}, at::kFloat);
    for (int64_t i = 0; i < kBatch; ++i) {
      data::SampleRandom random(7, step, i);
      for (int64_t j = 0; j < gan.latent_size(); ++j) noise[i][j] = random.normal();
    }
    noise = noise.to(at::kDouble);
    const at::Tensor fake = gan.generate(noise).detach();
    bce(gan.discriminate(batch.data), 1 - kSmoothing).backward();
    bce(gan.discriminate(fake), 0).backward();
    update("discriminator");
    // A second pass, since each update generates its own images: running statistics include the
    // batch twice.
    bce(gan.discriminate(gan.generate(noise)), 1).backward();
    update("generator");
  }
  return models::state_dict(gan);
}

TEST(GanTest, RanksTakeTheStepsOfOneProcessOnTheWholeBatch) {
  for (const int ranks : {1, 2, 4}) {
    test::run_ranks(ranks, [&](int rank) {
      const models::StateDict expected = by_hand();
      dist::init_process_group();
      const auto model = network(models::Norm::kSync);
      const auto task =
          test::from_yaml<TaskKind>(fmt::format("{{type: gan, label_smoothing: {}}}", kSmoothing),
                                    "task")
              .make(*data::make_synthetic({.height = kSide, .width = kSide}, data::Split::kTrain));
      task->attach(*model);
      Config config;
      config.optimizer =
          test::from_yaml<OptimizerKind>(fmt::format("{{type: sgd, lr: {}}}", kRate), "optimizer");
      const BatchToDevice to_device({.device = at::kCPU, .normalization = {}});
      TrainingStep step(config, *task, to_device, model);
      step.train();
      for (int i = 0; i < kSteps; ++i) {
        data::SampleRandom unused(0, 0, 0);
        step.run(part_of(batch_of(i), rank, ranks), kRate, unused, {});
      }
      step.finish();
      for (const auto& item : models::state_dict(*model)) {
        const at::Tensor& other = expected[item.key()];
        EXPECT_LT((item.value() - other).abs().max().item<double>(), 1e-12) << item.key();
      }
      dist::destroy_process_group();
    });
  }
}

}  // namespace
}  // namespace syncbn::train
