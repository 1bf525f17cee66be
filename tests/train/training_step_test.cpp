#include "step/training_step.h"

#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/error.h>
#include <syncbn/data/synthetic.h>
#include <syncbn/dist/process_group.h>

#include "support/from_yaml.h"
#include "support/multiproc.h"
#include "support/thrown.h"

namespace syncbn::train {
namespace {

constexpr int64_t kImageSide = 8;  // one value per channel in the last stages of a resnet18

struct TooSmall {
  models::Norm norm;
  int64_t accumulate;
  std::vector<int64_t> sizes;  // of the ranks' batches
  int64_t trained;             // samples that have a variance
};

// Batches that have lost samples.
TEST(TrainingStepTest, WhatIsTooSmallForBatchNormCountsAsEmptyWhereSamplesMayBeLeftOut) {
  const auto set =
      data::make_synthetic({.height = kImageSide, .width = kImageSide}, data::Split::kTrain);
  for (const TooSmall& one : std::vector<TooSmall>{{models::Norm::kLocal, 1, {1}, 0},
                                                   {models::Norm::kLocal, 2, {3}, 2},
                                                   {models::Norm::kLocal, 1, {1, 4}, 4},
                                                   {models::Norm::kSync, 1, {1}, 0},
                                                   {models::Norm::kSync, 1, {0, 1}, 0},
                                                   {models::Norm::kSync, 1, {1, 1}, 2}}) {
    test::run_ranks(static_cast<int>(one.sizes.size()), [&](int rank) {
      dist::init_process_group();
      models::ModelArgs args;
      args.num_classes = 10;
      args.sample_shape = {3, kImageSide, kImageSide};
      args.norm = one.norm;
      const std::shared_ptr<models::Model> model =
          test::from_yaml<models::ModelKind>("resnet18", "model").make(args);
      const auto task = config::Component<TaskKind>("classification").make(*set);
      task->attach(*model);
      Config config;
      config.model = config::Component<models::ModelKind>("resnet18");
      config.data = config::Component<data::DatasetKind>("synthetic");
      config.sync_batchnorm = one.norm == models::Norm::kSync;
      config.accumulate = one.accumulate;
      const BatchToDevice to_device({.device = at::kCPU, .normalization = {}});
      TrainingStep step(config, *task, to_device, model);
      step.train();
      const int64_t size = one.sizes[static_cast<size_t>(rank)];
      const auto run = [&] {
        data::SampleRandom unused(0, 0, 0);
        step.run({at::ones({size, 3, kImageSide, kImageSide}), at::zeros({size}, at::kLong)}, 0.1,
                 unused, {});
        return step.finish();
      };
      config.loader.on_error = "skip";
      for (int i = 0; i < 2; ++i) {
        const auto result = run();
        ASSERT_TRUE(result);
        EXPECT_TRUE(step.is_good(*result));
        EXPECT_EQ(result->samples, one.trained);
        EXPECT_EQ(result->loss_sum > 0, one.trained > 0);
      }
      config.loader.on_error = "raise";
      if (one.sizes.size() == 1) {
        EXPECT_THAT(test::message_of<base::UserError>(run),
                    ::testing::HasSubstr("one value per channel"));
      }
      dist::destroy_process_group();
    });
  }
}

}  // namespace
}  // namespace syncbn::train
