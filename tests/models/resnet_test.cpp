#include <syncbn/models/resnet.h>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/init.h>
#include <torch/utils.h>

#include <cmath>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <syncbn/base/error.h>

namespace syncbn::models {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

/// One entry of torchvision's state_dict(); see make_resnet_fixtures.py.
struct Entry {
  std::string name, shape;
  double sum, squares;
};

struct Reference {
  std::vector<Entry> parameters, buffers;
  std::vector<std::vector<double>> eval, train;  ///< the first logits of each sample
};

Reference read_reference(const std::string& model) {
  const std::string path = SYNCBN_SOURCE_DIR "/tests/models/" + model + ".txt";
  std::ifstream file(path);
  EXPECT_TRUE(file.is_open()) << path;
  Reference reference;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string kind;
    words >> kind;
    if (kind == "param" || kind == "buffer") {
      Entry entry;
      words >> entry.name >> entry.shape >> entry.sum >> entry.squares;
      (kind == "param" ? reference.parameters : reference.buffers).push_back(entry);
    } else {
      int sample = 0;
      words >> sample;
      std::vector<double> logits;
      for (double logit = 0; words >> logit;) logits.push_back(logit);
      (kind == "eval" ? reference.eval : reference.train).push_back(logits);
    }
  }
  return reference;
}

std::string shape_of(const at::Tensor& tensor) {
  return tensor.dim() == 0 ? "scalar" : fmt::format("{}", fmt::join(tensor.sizes(), "x"));
}

using Tensors = torch::OrderedDict<std::string, at::Tensor>;

std::vector<std::string> names_and_shapes(const Tensors& tensors) {
  std::vector<std::string> lines;
  for (const auto& item : tensors) lines.push_back(item.key() + " " + shape_of(item.value()));
  return lines;
}

std::vector<std::string> names_and_shapes(const std::vector<Entry>& entries) {
  std::vector<std::string> lines;
  lines.reserve(entries.size());
  for (const Entry& entry : entries) lines.push_back(entry.name + " " + entry.shape);
  return lines;
}

at::Tensor wave(at::IntArrayRef shape) {
  return at::sin(at::arange(c10::multiply_integers(shape), at::kDouble)).reshape(shape);
}

/// The same values as fill() of make_resnet_fixtures.py.
void fill(const Tensors& tensors) {
  for (const auto& item : tensors) {
    const std::string& name = item.key();
    const at::Tensor& tensor = item.value();
    if (name.ends_with("num_batches_tracked")) continue;
    at::Tensor values = wave(tensor.sizes());
    if (tensor.dim() > 1) {
      values *= std::sqrt(2.0 * static_cast<double>(tensor.size(0)) /
                          static_cast<double>(tensor.numel()));
    } else if (name.ends_with("running_var")) {
      values = values * values * 0.5 + 1;
    } else if (name.ends_with("weight")) {
      values = values * 0.1 + 1;
    } else {
      values *= 0.1;
    }
    tensor.copy_(values);
  }
}

std::shared_ptr<Model> make(const std::string& type, const ModelArgs& args = {}) {
  return config::Component<ModelKind>(type).make(args);
}

class TorchvisionTest : public ::testing::TestWithParam<std::string> {
 protected:
  const Reference reference_ = read_reference(GetParam());
  at::NoGradGuard no_grad_;
};

TEST_P(TorchvisionTest, HasItsParametersAndBuffersInItsOrder) {
  for (const Norm norm : {Norm::kLocal, Norm::kSync}) {
    const auto model = make(GetParam(), {.norm = norm});
    EXPECT_EQ(names_and_shapes(model->named_parameters()), names_and_shapes(reference_.parameters));
    EXPECT_EQ(names_and_shapes(model->named_buffers()), names_and_shapes(reference_.buffers));
  }
}

TEST_P(TorchvisionTest, DrawsItsInitialValuesFromTheSameSeed) {
  for (const Norm norm : {Norm::kLocal, Norm::kSync}) {
    torch::manual_seed(0);
    const auto model = make(GetParam(), {.norm = norm});
    const auto expect_same = [](const std::vector<Entry>& entries, const Tensors& tensors) {
      for (const Entry& entry : entries) {
        const at::Tensor values = tensors[entry.name].to(at::kDouble);
        EXPECT_NEAR(values.sum().item<double>(), entry.sum, 1e-4) << entry.name;
        EXPECT_NEAR(values.square().sum().item<double>(), entry.squares, 1e-6 * (1 + entry.squares))
            << entry.name;
      }
    };
    expect_same(reference_.parameters, model->named_parameters());
    expect_same(reference_.buffers, model->named_buffers());
  }
}

TEST_P(TorchvisionTest, ComputesItsLogits) {
  // In float64, because batch norm over two samples amplifies float32's rounding, which depends on
  // the number of threads, to differences of a few percent.
  const auto model = make(GetParam());
  model->to(at::kDouble);
  fill(model->named_parameters());
  fill(model->named_buffers());
  const at::Tensor images = wave({2, 3, 64, 64});
  for (const bool train : {false, true}) {
    model->train(train);
    const at::Tensor logits = model->forward(images);
    ASSERT_EQ(logits.sizes(), (std::vector<int64_t>{2, 1000}));
    const auto& expected = train ? reference_.train : reference_.eval;
    ASSERT_EQ(expected.size(), 2U);
    for (int64_t sample = 0; sample < 2; ++sample) {
      const auto& row = expected[static_cast<size_t>(sample)];
      ASSERT_EQ(row.size(), 5U);
      for (int64_t k = 0; k < 5; ++k) {
        // Processors with other instruction sets round differently: 7e-6 at a logit of 9 was
        // observed.
        EXPECT_NEAR(logits[sample][k].item<double>(), row[static_cast<size_t>(k)], 1e-4)
            << (train ? "train" : "eval") << " sample " << sample << " logit " << k;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(ResNet, TorchvisionTest, ::testing::Values("resnet18", "resnet50"),
                         [](const auto& info) { return info.param; });

TEST(ResNetTest, KeepsTheResolutionOfSmallInputs) {
  const auto small =
      resnet18({.num_classes = 10, .sample_shape = {3, 32, 32}}, {.small_input = true});
  EXPECT_EQ(shape_of(small->named_parameters()["conv1.weight"]), "64x3x3x3");
  EXPECT_EQ(shape_of(small->forward(at::zeros({2, 3, 32, 32}))), "2x10");
}

// The paper's table 6 gives millions: 0.27, 0.46, 0.66, 0.85 and 1.7.
TEST(CifarResNetTest, HasThePapersNumberOfParameters) {
  const ModelArgs args{.num_classes = 10, .sample_shape = {3, 32, 32}};
  for (const auto& [name, expected] : {std::pair<std::string, int64_t>("resnet20", 269722),
                                       {"resnet32", 464154},
                                       {"resnet44", 658586},
                                       {"resnet56", 853018},
                                       {"resnet110", 1727962}}) {
    int64_t parameters = 0;
    for (const at::Tensor& parameter : make(name, args)->parameters()) {
      parameters += parameter.numel();
    }
    EXPECT_EQ(parameters, expected) << name;
  }
}

TEST(CifarResNetTest, HasThreeStagesAndShortcutsWithoutParameters) {
  const auto model = make("resnet20", {.num_classes = 10, .sample_shape = {3, 32, 32}});
  const auto parameters = model->named_parameters();
  EXPECT_EQ(shape_of(parameters["conv1.weight"]), "16x3x3x3");
  EXPECT_EQ(shape_of(parameters["layer3.0.conv1.weight"]), "64x32x3x3");
  EXPECT_EQ(shape_of(parameters["fc.weight"]), "10x64");
  for (const auto& item : parameters) EXPECT_EQ(item.key().find("downsample"), std::string::npos);
  EXPECT_EQ(shape_of(model->forward(at::zeros({2, 3, 32, 32}))), "2x10");
}

TEST(CifarResNetTest, ShortcutsTakeEverySecondPixelAndAddZeroChannels) {
  const auto model = make("resnet20", {.num_classes = 10, .sample_shape = {3, 8, 8}});
  // A block whose last norm has zero weights consists of its shortcut and ReLU.
  for (const auto& item : model->named_parameters()) {
    if (item.key().ends_with("bn2.weight")) torch::nn::init::zeros_(item.value());
  }
  const at::Tensor images = wave({1, 3, 8, 8}).to(at::kFloat);
  at::Tensor stem = at::conv2d(images, model->named_parameters()["conv1.weight"], {}, 1, 1);
  stem = at::batch_norm(stem, at::ones(16), at::zeros(16), {}, {}, true, 0.1, 1e-5, false).relu();
  const at::Tensor taken = stem.slice(2, 0, 8, 4).slice(3, 0, 8, 4);
  const at::Tensor features = at::constant_pad_nd(taken, {0, 0, 0, 0, 24, 24}).mean({2, 3});
  const at::Tensor expected = at::linear(features, model->named_parameters()["fc.weight"],
                                         model->named_parameters()["fc.bias"]);
  EXPECT_TRUE(at::allclose(model->forward(images), expected, 1e-4, 1e-5));
}

TEST(ResNetTest, TakesAnyNumberOfChannels) {
  const auto grey = resnet18({.num_classes = 4, .sample_shape = {1, 28, 28}});
  EXPECT_EQ(shape_of(grey->forward(at::zeros({3, 1, 28, 28}))), "3x4");
}

TEST(ResNetTest, ZeroInitResidualZeroesTheLastNormOfEachBlock) {
  const ResNetOptions options{.zero_init_residual = true};
  for (const auto& [model, last] :
       {std::pair(resnet18({.num_classes = 2}, options), "bn2.weight"),
        std::pair(resnet50({.num_classes = 2}, options), "bn3.weight")}) {
    for (const auto& item : model->named_parameters()) {
      if (item.value().dim() != 1 || !item.key().ends_with("weight")) continue;
      const double expected = item.key().ends_with(last) ? 0 : 1;
      EXPECT_EQ(item.value().mean().item<double>(), expected) << item.key();
    }
  }
}

TEST(ResNetTest, GivesEveryParameterAGradient) {
  const auto model =
      resnet18({.num_classes = 2, .sample_shape = {3, 32, 32}}, {.small_input = true});
  model->forward(wave({4, 3, 32, 32}).to(at::kFloat)).square().sum().backward();
  for (const auto& item : model->named_parameters()) {
    ASSERT_TRUE(item.value().grad().defined()) << item.key();
    EXPECT_GT(item.value().grad().abs().sum().item<double>(), 0) << item.key();
  }
}

TEST(ResNetTest, SynchronisedNormGivesTheSameResultOnOneRank) {
  std::vector<at::Tensor> logits;
  for (const Norm norm : {Norm::kLocal, Norm::kSync}) {
    torch::manual_seed(1);
    const auto model = resnet18({.num_classes = 3, .sample_shape = {3, 32, 32}, .norm = norm},
                                {.small_input = true});
    logits.push_back(model->forward(wave({4, 3, 32, 32}).to(at::kFloat)));
  }
  EXPECT_TRUE(at::allclose(logits[0], logits[1], 1e-4, 1e-4));
}

TEST(ResNetTest, RefusesSamplesThatAreNotImages) {
  for (const std::vector<int64_t>& shape :
       std::vector<std::vector<int64_t>>{{}, {3}, {3, 32}, {0, 32, 32}, {3, 0, 32}}) {
    EXPECT_THAT([&] { resnet18({.sample_shape = shape}); },
                ThrowsMessage<base::UserError>(HasSubstr("model resnet18: takes images")));
  }
}

TEST(ResNetTest, RefusesZeroClasses) {
  EXPECT_THAT([] { resnet50({.num_classes = 0}); },
              ThrowsMessage<base::UserError>(HasSubstr("at least one class, got 0")));
}

TEST(ResNetTest, DropoutAndStochasticDepthAreOfTrainingAlone) {
  const ModelArgs args{.num_classes = 3, .sample_shape = {3, 32, 32}};
  const at::Tensor images = wave({2, 3, 32, 32}).to(at::kFloat);
  const auto logits = [&](const ResNetOptions& options, bool train) {
    at::manual_seed(1);
    const auto model = resnet18(args, options);
    model->train(train);
    return model->forward(images);
  };
  for (const ResNetOptions& options :
       {ResNetOptions{.dropout = 0.5}, ResNetOptions{.stochastic_depth = 0.9}}) {
    EXPECT_TRUE(at::equal(logits(options, false), logits({}, false)));
    EXPECT_FALSE(at::allclose(logits(options, true), logits({}, true)));
  }
  // Also for a network in training whose batch norm layers are frozen.
  at::manual_seed(1);
  const auto frozen = resnet18(args, {.stochastic_depth = 0.9});
  for (const auto& module : frozen->modules(/*include_self=*/false)) {
    if (module->named_buffers(/*recurse=*/false).size() > 0) module->eval();
  }
  EXPECT_FALSE(at::equal(frozen->forward(images), frozen->forward(images)));
}

}  // namespace
}  // namespace syncbn::models
