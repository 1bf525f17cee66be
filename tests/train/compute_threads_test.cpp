#include "step/compute_threads.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <syncbn/models/digits_net.h>
#include <syncbn/models/resnet.h>

#include "support/from_yaml.h"

namespace syncbn::train {
namespace {

// From torchvision's metadata: 1.814 and 4.089 giga multiply-adds at 224 x 224.
TEST(MultiplyAddsTest, OfResNetsAreThoseOfTorchvision) {
  const std::vector<int64_t> image = {3, 224, 224};
  EXPECT_NEAR(static_cast<double>(multiply_adds(*models::resnet18(), image)), 1.814e9, 1e6);
  EXPECT_NEAR(static_cast<double>(multiply_adds(*models::resnet50(), image)), 4.089e9, 1e6);
}

/// The number of threads that a run uses if there are two.
int threads_of(models::Model& model, int64_t batch_size, const Config& config = {}) {
  const auto data = test::from_yaml<data::DatasetKind>(
                        "{type: synthetic, size: 1, channels: 1, height: 8, width: 8}", "data")
                        .make(data::Split::kTrain);
  const int former = at::get_num_threads();
  at::set_num_threads(2);
  choose_threads(config, model, *data, batch_size);
  const int threads = at::get_num_threads();
  at::set_num_threads(former);
  return threads;
}

TEST(ChooseThreadsTest, SmallNetworksTakeOne) {
  models::ModelArgs args;
  args.sample_shape = {1, 8, 8};
  args.num_classes = 10;
  const auto digits = models::digits_net(args, {.width = 16});
  EXPECT_EQ(threads_of(*digits, 8), 1);
  EXPECT_EQ(threads_of(*digits, 64), 2) << "of a larger batch it is worth while";
  Config config;
  config.accumulate = 8;
  EXPECT_EQ(threads_of(*digits, 64, config), 1) << "a part of the batch counts";
  config.threads = 2;
  EXPECT_EQ(threads_of(*digits, 8, config), 2) << "the configuration has the last word";
  EXPECT_EQ(threads_of(*models::resnet18(args, {.small_input = true}), 1), 2);
}

}  // namespace
}  // namespace syncbn::train
