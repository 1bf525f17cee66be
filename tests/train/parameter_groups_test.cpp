#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/train/config.h>

#include "optimizers/parameter_groups.h"
#include "support/thrown.h"
#include "train/optimizer_support.h"

namespace syncbn::train {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

/// The parameters of a small ResNet, with torchvision's names.
NamedTensors resnet() {
  return {{"conv1.weight", at::ones({4, 3, 3, 3})},
          {"bn1.weight", at::ones({4})},
          {"bn1.bias", at::ones({4})},
          {"layer1.0.conv1.weight", at::ones({4, 4, 3, 3})},
          {"layer1.1.bn1.weight", at::ones({4})},
          {"fc.weight", at::ones({2, 4})},
          {"fc.bias", at::ones({2})}};
}

std::vector<double> decays(const CommonOptions& options) {
  std::vector<double> all;
  for (const ParameterRates& rates : parameter_rates(options, resnet())) {
    all.push_back(rates.weight_decay);
  }
  return all;
}

std::vector<double> rates(const CommonOptions& options) {
  std::vector<double> all;
  for (const ParameterRates& rates : parameter_rates(options, resnet())) all.push_back(rates.lr);
  return all;
}

std::string fault(const CommonOptions& options) {
  return test::message_of<base::UserError>([&] { parameter_rates(options, resnet()); });
}

TEST(ParameterGroupsTest, NoDecayKnowsNormAndBias) {
  CommonOptions options{.weight_decay = 1};
  EXPECT_THAT(decays(options), ElementsAre(1, 1, 1, 1, 1, 1, 1));
  options.no_decay = {"bias"};
  EXPECT_THAT(decays(options), ElementsAre(1, 1, 0, 1, 1, 1, 0));
  options.no_decay = {"norm"};
  EXPECT_THAT(decays(options), ElementsAre(1, 0, 0, 1, 0, 1, 1));
  options.no_decay = {"norm", "bias", "layer?.*conv*"};
  EXPECT_THAT(decays(options), ElementsAre(1, 0, 0, 0, 0, 1, 0));
}

TEST(ParameterGroupsTest, TheFirstGroupThatMatchesCounts) {
  CommonOptions options{.lr = 0.5, .weight_decay = 1, .no_decay = {"bias"}};
  options.groups = {{.match = "fc.*", .lr = GroupRate{3, false}, .weight_decay = 2},
                    {.match = "*.bias", .lr = GroupRate{0.1, true}, .weight_decay = {}},
                    {.match = "layer[12].*", .lr = {}, .weight_decay = 0}};
  EXPECT_THAT(rates(options), ElementsAre(0.5, 0.5, 0.5 * 0.1, 0.5, 0.5, 3, 3));
  EXPECT_THAT(decays(options), ElementsAre(1, 1, 0, 0, 0, 2, 2));
  options.groups = {{.match = "norm", .lr = GroupRate{2, true}, .weight_decay = {}}};
  EXPECT_THAT(rates(options), ElementsAre(0.5, 1, 1, 0.5, 1, 0.5, 0.5));
}

TEST(ParameterGroupsTest, LayerDecayLeavesTheLastLayerAlone) {
  CommonOptions options{.lr = 1, .layer_decay = 0.5};
  EXPECT_THAT(rates(options), ElementsAre(0.125, 0.25, 0.25, 0.5, 0.5, 1, 1));
  // A group's rate replaces it.
  options.groups = {{.match = "conv1.*", .lr = GroupRate{1, true}, .weight_decay = {}},
                    {.match = "bn1.*", .lr = {}, .weight_decay = 0}};
  EXPECT_THAT(rates(options), ElementsAre(1, 0.25, 0.25, 0.5, 0.5, 1, 1));
  EXPECT_TRUE(parameter_rates(options = {.layer_decay = 0.5}, {}).empty());
}

TEST(ParameterGroupsTest, LayersFollowTheNames) {
  EXPECT_THAT(layers_of({"0.weight", "0.bias", "3.weight"}), ElementsAre(0, 0, 1));
  EXPECT_THAT(layers_of({"weight", "bias"}), ElementsAre(0, 1));
  EXPECT_THAT(layers_of({"cls_token", "patch_embed.proj.weight", "blocks.0.norm1.weight",
                         "blocks.0.attn.qkv.weight", "blocks.1.norm1.weight", "norm.weight",
                         "head.weight", "head.bias"}),
              ElementsAre(0, 1, 2, 2, 3, 4, 5, 5));
  EXPECT_THAT(layers_of({"encoder.position", "encoder.layers.layer_0.mlp.0.weight",
                         "encoder.layers.layer_0.mlp.3.weight", "encoder.layers.layer_1.ln.weight",
                         "encoder.ln.weight", "features.denseblock1.layer2.weight"}),
              ElementsAre(0, 1, 1, 2, 3, 4));
}

std::string read_fault(const std::string& yaml, const NamedTensors& parameters = resnet()) {
  return test::message_of<base::UserError>([&] { optimizer(yaml, parameters); });
}

TEST(ParameterGroupsTest, APatternThatMatchesNothingIsNamed) {
  CommonOptions options;
  options.no_decay = {"bias", "layer9.*"};
  EXPECT_EQ(fault(options),
            "optimizer.no_decay.1: 'layer9.*' matches no parameter; the model has conv1.weight, "
            "bn1.weight, layer1.0.conv1.weight, layer1.1.bn1.weight, fc.bias and 2 more");
  EXPECT_THAT(read_fault("{type: sgd, no_decay: [norm]}", {resnet()[0]}),
              HasSubstr("optimizer.no_decay.0: 'norm' matches no parameter"));
  options = {};
  options.groups = {{.match = "fc.*", .lr = {}, .weight_decay = {}},
                    {.match = "backbone.*", .lr = {}, .weight_decay = {}}};
  EXPECT_THAT(fault(options), HasSubstr("optimizer.groups.1.match: 'backbone.*' matches no"));
  options.groups[1].match = "fc.weight";
  EXPECT_THAT(fault(options), AllOf(HasSubstr("optimizer.groups.1.match: groups before it have"),
                                    Not(HasSubstr("matches no"))));
}

TEST(ParameterGroupsTest, GroupsAreReadWithTheirRules) {
  EXPECT_NO_THROW(
      optimizer("{type: adam, groups: [{match: fc.*, lr: 0.1x, weight_decay: 0}]}", resnet()));
  EXPECT_NO_THROW(
      optimizer("{type: lamb, groups: [{match: fc.*, lr: 1e-3}], layer_decay: 0.8}", resnet()));
  for (const char* lr : {"x", "-1", "fast", "[1]", "-0.1x", "inf"}) {
    EXPECT_THAT(read_fault(fmt::format("{{type: sgd, groups: [{{match: fc.*, lr: {}}}]}}", lr)),
                HasSubstr("optimizer.groups.0.lr: expected a learning rate such as 0.01"));
  }
  EXPECT_THAT(read_fault("{type: sgd, groups: [{lr: 1}]}"),
              HasSubstr("the key 'optimizer.groups.0.match' is missing"));
  EXPECT_THAT(read_fault("{type: sgd, groups: [{match: a, rate: 1}]}"),
              HasSubstr("unknown key 'optimizer.groups.0.rate'"));
  EXPECT_THAT(read_fault("{type: sgd, layer_decay: 1.5}"), HasSubstr("optimizer.layer_decay"));
}

TEST(ParameterGroupsTest, GroupsAreWrittenAsTheyWereRead) {
  const std::string yaml =
      "{type: sgd, no_decay: [norm, b*], layer_decay: 0.75, lr_batch: 256, "
      "groups: [{match: fc.*, lr: 0.1x, weight_decay: 0}, {match: '*', lr: 0.01}]}";
  const auto first = test::from_yaml<OptimizerKind>(yaml, "optimizer");
  const std::string written = config::to_yaml(first.write());
  EXPECT_THAT(written, HasSubstr("0.1x"));
  const auto second = test::from_yaml<OptimizerKind>(written, "optimizer");
  EXPECT_EQ(config::to_yaml(second.write()), written);
}

TEST(ParameterGroupsTest, TheRateGrowsWithTheBatch) {
  const auto plain = optimizer("{type: sgd, lr: 0.1}", {});
  EXPECT_EQ(scaled_lr(*plain, 4096), 0.1);
  const auto scaled = optimizer("{type: sgd, lr: 0.1, lr_batch: 256}", {});
  EXPECT_EQ(scaled->base_lr(), 0.1);
  EXPECT_EQ(scaled_lr(*scaled, 256), 0.1);
  EXPECT_DOUBLE_EQ(scaled_lr(*scaled, 1024), 0.4);
}

TEST(ParameterGroupsTest, TheScheduleScalesTheRatesOfAllGroups) {
  const NamedTensors parameters = make_parameters();
  const std::vector<at::Tensor> before = {parameters[0].second.detach().clone(),
                                          parameters[1].second.detach().clone()};
  for (const auto& [name, parameter] : parameters)
    parameter.mutable_grad() = at::ones_like(parameter);
  const auto mine = optimizer("{type: sgd, lr: 1, groups: [{match: bias, lr: 0.5}]}", parameters);
  mine->step(0.25);
  EXPECT_TRUE(at::allclose(parameters[0].second, before[0] - 0.25));
  EXPECT_TRUE(at::allclose(parameters[1].second, before[1] - 0.125));
}

TEST(ParameterGroupsTest, SparseGradientsNeedAGroupWithoutWeightDecay) {
  const NamedTensors parameters = make_parameters();
  parameters[0].second.mutable_grad() = at::ones({3, 4}).to_sparse();
  EXPECT_THROW(optimizer("{type: sgd, weight_decay: 0.1}", parameters)->step(0.1), base::UserError);
  optimizer("{type: sgd, weight_decay: 0.1, no_decay: [weigh*]}", parameters)->step(0.1);
}

}  // namespace
}  // namespace syncbn::train
