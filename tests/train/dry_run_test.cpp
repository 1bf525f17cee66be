#include "dry_run.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <syncbn/models/resnet.h>

namespace syncbn::train {
namespace {

// torchvision's metadata: 1.814 and 4.089 giga multiply-adds at 224 x 224.
TEST(DryRunTest, CountsTheMultiplyAddsOfResNets) {
  const at::Tensor image = at::zeros({1, 3, 224, 224});
  EXPECT_NEAR(static_cast<double>(multiply_adds(*models::resnet18(), image)), 1.814e9, 1e6);
  EXPECT_NEAR(static_cast<double>(multiply_adds(*models::resnet50(), image)), 4.089e9, 1e6);
}

}  // namespace
}  // namespace syncbn::train
