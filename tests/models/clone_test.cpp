// clone() of every network of the registry, and DataParallel around them.
#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/data_parallel.h>
#include <syncbn/dist/sync_batch_norm.h>
#include <syncbn/models/model.h>
#include <syncbn/models/resnet.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/modules/linear.h>

#include <chrono>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "support/from_yaml.h"
#include "support/temp_folder.h"
#include "support/thrown.h"

namespace syncbn::models {
namespace {

using dist::DataParallel;
using ::testing::HasSubstr;

constexpr size_t kParts = 12;  // parts of the exhaustive test, which ctest runs in parallel
const dist::DataParallelOptions kTwoReplicas{.device_ids = {at::kCPU, at::kCPU},
                                             .sync_timeout = std::chrono::seconds(60)};

/// One network of each kind; the exhaustive test has the others.
const std::set<std::string> kOneOfEach = {"convnext_tiny",
                                          "dcgan",
                                          "densenet121",
                                          "digits",
                                          "efficientnet_b0",
                                          "googlenet",
                                          "lraspp_mobilenet_v3_large",
                                          "mnasnet0_5",
                                          "mobilenet_v2",
                                          "regnet_y_400mf",
                                          "resnet18",
                                          "resnet20",
                                          "retinanet_resnet18_fpn",
                                          "shufflenet_v2_x0_5",
                                          "squeezenet1_1",
                                          "unet"};

ModelArgs args_of(const std::string& name, Norm norm = Norm::kSync) {
  const int64_t side = name == "dcgan" ? 64 : name == "inception_v3" ? 299 : 96;
  return {.num_classes = 3, .sample_shape = {3, side, side}, .norm = norm};
}

std::shared_ptr<Model> copy_of(const Model& model) {
  return std::dynamic_pointer_cast<Model>(model.clone());
}

template <class List>
void expect_own_tensors(const List& own, const List& others) {
  ASSERT_EQ(own.keys(), others.keys());
  for (const auto& item : own) {
    const at::Tensor& other = others[item.key()];
    EXPECT_TRUE(item.value().equal(other)) << item.key();
    EXPECT_FALSE(item.value().is_alias_of(other)) << item.key();
    EXPECT_EQ(item.value().requires_grad(), other.requires_grad()) << item.key();
    EXPECT_TRUE(item.value().is_leaf() && other.is_leaf()) << item.key();
    EXPECT_EQ(item.value().strides(), other.strides()) << item.key();
  }
}

std::string printed(const torch::nn::Module& module) {
  std::ostringstream text;
  text << module;
  return text.str();
}

void expect_equal_clone(const std::string& name) {
  SCOPED_TRACE(name);
  at::manual_seed(1);
  const auto model = config::Component<ModelKind>(name).make(args_of(name));
  const at::NoGradGuard no_grad;
  // What happens to a network between construction and cloning.
  for (at::Tensor& parameter : model->parameters()) parameter.set_data(parameter * 0.9);
  for (at::Tensor& buffer : model->buffers()) buffer.set_data(buffer * 2 + 1);
  model->parameters().front().set_requires_grad(false);
  model->eval();
  model->children().front()->train();
  at::manual_seed(5);
  const at::Tensor expected_random = at::randn({4});
  at::manual_seed(5);
  const auto copy = copy_of(*model);
  EXPECT_TRUE(at::randn({4}).equal(expected_random)) << "it drew random numbers";
  ASSERT_NE(copy, nullptr);
  EXPECT_EQ(printed(*copy), printed(*model));
  expect_own_tensors(copy->named_parameters(), model->named_parameters());
  expect_own_tensors(copy->named_buffers(), model->named_buffers());
  const auto parts = model->modules();
  const auto copied = copy->modules();
  ASSERT_EQ(copied.size(), parts.size());
  for (size_t i = 0; i < parts.size(); ++i) {
    EXPECT_EQ(copied[i]->is_training(), parts[i]->is_training()) << parts[i]->name();
  }
  EXPECT_NE(copy_of(*copy), nullptr) << "a copy can be copied";
}

/// The names of a part: part 0 has kOneOfEach, parts 1 to kParts the others.
std::vector<std::string> names_of_part(size_t part) {
  if (part == 0) return {kOneOfEach.begin(), kOneOfEach.end()};
  std::vector<std::string> others = ModelKind::registry().names();
  std::erase_if(others, [](const std::string& name) {
    return kOneOfEach.contains(name) || name == "torchscript";
  });
  std::vector<std::string> names;
  for (size_t i = part - 1; i < others.size(); i += kParts) names.push_back(others[i]);
  return names;
}

class CloneTest : public ::testing::TestWithParam<size_t> {};

TEST_P(CloneTest, EqualsTheNetworkAndSharesNothing) {
  at::set_num_threads(1);
  for (const std::string& name : names_of_part(GetParam())) expect_equal_clone(name);
}

INSTANTIATE_TEST_SUITE_P(Models, CloneTest, ::testing::Values(size_t{0}));
INSTANTIATE_TEST_SUITE_P(Exhaustive, CloneTest, ::testing::Range(size_t{1}, kParts + 1));

// In evaluation mode, where results do not depend on dropout and stochastic depth.
TEST(CloneDataParallelTest, NetworksOfEachKindRunInTwoReplicas) {
  at::set_num_threads(1);
  const at::NoGradGuard no_grad;
  for (const std::string& name : kOneOfEach) {
    SCOPED_TRACE(name);
    at::manual_seed(1);
    const ModelArgs args = args_of(name);
    const auto model = config::Component<ModelKind>(name).make(args);
    model->eval();
    DataParallel dp(model, kTwoReplicas);
    std::vector<int64_t> shape = args.sample_shape;
    shape.insert(shape.begin(), 3);
    const at::Tensor images = at::randn(shape);
    const at::Tensor expected = model->forward(images);
    EXPECT_TRUE(at::allclose(dp(images), expected, 1e-4, 1e-5));
  }
}

// m = models.resnet50(); m = nn.DataParallel(m); m = convert_model(m)
TEST(CloneDataParallelTest, ResNet50IsWrappedAndConvertedAsItIsMade) {
  at::set_num_threads(1);
  const auto make = [] {
    at::manual_seed(1);
    const auto model = resnet50({.num_classes = 4, .sample_shape = {3, 32, 32}});
    model->to(at::kDouble);
    return model;
  };
  const auto model = make();
  const auto whole = make();
  DataParallel dp(model, kTwoReplicas);
  const auto report = dist::convert_sync_batchnorm(dp.module());
  EXPECT_EQ(report.converted.size(), 53u);
  EXPECT_TRUE(report.refuse_one_value.empty());
  const at::Tensor images = at::randn({8, 3, 32, 32}, at::kDouble);
  const at::Tensor scores = dp(images);
  const at::Tensor expected_scores = whole->forward(images);
  EXPECT_TRUE(at::allclose(scores, expected_scores, 1e-6, 1e-8));
  scores.sum().backward();
  expected_scores.sum().backward();
  const auto gradients = whole->named_parameters();
  for (const auto& item : model->named_parameters()) {
    const at::Tensor& expected = gradients[item.key()].grad();
    EXPECT_LT((item.value().grad() - expected).abs().max().item<double>(),
              1e-6 * (1 + expected.abs().max().item<double>()))
        << item.key();
  }
  EXPECT_TRUE(at::allclose(model->named_buffers()["layer4.2.bn3.running_var"],
                           whole->named_buffers()["layer4.2.bn3.running_var"], 1e-6, 1e-8));
  // In the last stage each replica has one value per channel. Statistics of two values make the
  // scores too sensitive to rounding to be compared.
  EXPECT_EQ(dp(images.narrow(0, 0, 2)).size(0), 2);
}

TEST(CloneOfModelTest, OfTorchScriptHasItsOwnTensors) {
  const test::TempFolder folder;
  const std::string path = (folder.path() / "net.pt").string();
  torch::jit::Module script("Net");
  script.register_attribute("training", c10::BoolType::get(), true);
  script.register_parameter("weight", at::randn({3, 2}).set_requires_grad(true),
                            /*is_buffer=*/false);
  script.define(
      "def forward(self, x):\n    return torch.matmul(torch.mean(x, [2, 3]), self.weight)\n");
  script.save(path);
  const auto model = test::from_yaml<ModelKind>("{type: torchscript, file: " + path + "}", "model")
                         .make(ModelArgs{.num_classes = 2, .sample_shape = {3, 4, 4}});
  model->eval();
  const auto copy = copy_of(*model);
  expect_own_tensors(copy->named_parameters(), model->named_parameters());
  EXPECT_FALSE(copy->is_training());
  const at::Tensor images = at::randn({2, 3, 4, 4});
  EXPECT_TRUE(copy->forward(images).equal(model->forward(images)));
  const at::NoGradGuard no_grad;
  copy->parameters()[0].zero_();
  EXPECT_EQ(copy->forward(images).abs().max().item<float>(), 0);
  EXPECT_NE(model->forward(images).abs().max().item<float>(), 0);
}

TEST(CloneOfModelTest, ChangedStructuresAndCustomNetworksSaySo) {
  const auto changed = resnet18({.num_classes = 2, .sample_shape = {3, 32, 32}});
  changed->unregister_module("fc");
  EXPECT_THAT(test::message_of<base::UserError>([&] { static_cast<void>(changed->clone()); }),
              HasSubstr("layers were added to the model or removed since it was made"));

  struct Custom : Model {
    Custom() { fc = register_module("fc", torch::nn::Linear(2, 2)); }
    at::Tensor forward(at::Tensor x) override { return fc(x); }
    torch::nn::Linear fc{nullptr};
  };
  EXPECT_ANY_THROW(static_cast<void>(std::make_shared<Custom>()->clone()));
  int made_so_far = 0;
  const auto once = cloneable([&]() -> std::shared_ptr<Model> {
    at::randn({4});
    if (made_so_far++ > 0) throw base::UserError("made already");
    return std::make_shared<Custom>();
  });
  at::manual_seed(5);
  const at::Tensor expected_random = at::randn({4});
  at::manual_seed(5);
  EXPECT_THROW(static_cast<void>(once->clone()), base::UserError);
  EXPECT_TRUE(at::randn({4}).equal(expected_random)) << "it drew random numbers";
  const auto made = cloneable([] { return std::make_shared<Custom>(); });
  const at::Tensor x = at::randn({2, 2});
  EXPECT_TRUE(copy_of(*made)->forward(x).equal(made->forward(x)));
  // DataParallel needs no clone().
  DataParallel dp(std::make_shared<Custom>(), kTwoReplicas);
  EXPECT_TRUE(at::allclose(dp(x), dp.module().forward(x)));
}

}  // namespace
}  // namespace syncbn::models
