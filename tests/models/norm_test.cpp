#include <syncbn/models/norm.h>

#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>

#include <memory>
#include <string>

#include <syncbn/dist/sync_batch_norm.h>

namespace syncbn::models {
namespace {

namespace nn = torch::nn;

struct Layers {
  int local = 0;
  int sync = 0;
};

Layers layers_of(const Model& model) {
  Layers layers;
  for (const auto& module : model.modules()) {
    if (module->as<dist::SyncBatchNorm>() != nullptr) ++layers.sync;
    if (module->as<nn::BatchNorm1d>() != nullptr || module->as<nn::BatchNorm2d>() != nullptr ||
        module->as<nn::BatchNorm3d>() != nullptr) {
      ++layers.local;
    }
  }
  return layers;
}

std::shared_ptr<Model> make(const std::string& type, Norm norm) {
  return config::Component<ModelKind>(type).make(ModelArgs{.norm = norm});
}

class NormTest : public ::testing::TestWithParam<std::string> {};

TEST_P(NormTest, AllLayersOfAModelAreOfItsKind) {
  const Layers local = layers_of(*make(GetParam(), Norm::kLocal));
  EXPECT_GT(local.local, 0);
  EXPECT_EQ(local.sync, 0);
  const Layers sync = layers_of(*make(GetParam(), Norm::kSync));
  EXPECT_EQ(sync.local, 0);
  EXPECT_EQ(sync.sync, local.local);
}

INSTANTIATE_TEST_SUITE_P(Models, NormTest, ::testing::ValuesIn(ModelKind::registry().names()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace syncbn::models
