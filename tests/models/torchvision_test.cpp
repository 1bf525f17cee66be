#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/error.h>
#include <syncbn/models/detector.h>
#include <syncbn/models/model.h>
#include <syncbn/models/weights.h>
#include <torch/utils.h>
#include <zlib.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "step/compute_threads.h"
#include "support/from_yaml.h"
#include "support/program.h"
#include "support/python.h"
#include "support/skip.h"

namespace syncbn::models {
namespace {

constexpr double kTrainingTolerance = 1e-9;    // float64
constexpr double kEvaluationTolerance = 1e-5;  // float32, of the largest logit

// Larger networks than these take too long.
constexpr int64_t kMostEvaluated = 200'000'000;  // parameters, as in torchvision_models.py

/// Networks that one file defines.
struct Family {
  std::string name;
  std::vector<std::string> members;  ///< "NAME", or with an option "NAME:KEY=true"
  std::vector<std::string> trained;  ///< members whose gradients are compared
  /// Others with the same code, which take long: for the exhaustive tests.
  std::vector<std::string> others = {};
  std::vector<std::string> others_trained = {};
  bool recomputes = true;    ///< has activation_checkpointing
  bool synchronises = true;  ///< has batch norm (and trains quickly)
  int64_t classes = 1000;
  int64_t evaluated_side = 64;  ///< of images, in pixels
  int64_t trained_side = 64;
  double aux_weight = 0;    ///< weight of auxiliary heads in the loss
  double most_counted = 5;  ///< giga multiply-adds; larger networks take too long
};

void PrintTo(const Family& family, std::ostream* out) {
  *out << family.name;
}

const std::vector<Family>& families() {
  static const std::vector<Family> all = {
      {.name = "ResNet",
       .members = {"resnet18", "resnext50_32x4d"},
       .trained = {"resnet18", "resnext50_32x4d"},
       .others = {"resnet34", "resnet50", "resnet101", "resnet152", "resnext101_32x8d",
                  "resnext101_64x4d", "wide_resnet50_2", "wide_resnet101_2"}},
      {.name = "Vgg",
       .members = {"vgg11_bn"},
       .trained = {"vgg11_bn"},
       .others = {"alexnet", "vgg11", "vgg13", "vgg16", "vgg19", "vgg13_bn", "vgg16_bn",
                  "vgg19_bn"},
       .others_trained = {"alexnet"},
       .recomputes = false,
       .synchronises = false},
      {.name = "MobileNet",
       .members = {"mobilenet_v2", "mobilenet_v3_small"},
       .trained = {"mobilenet_v2", "mobilenet_v3_small"},
       .others = {"mobilenet_v3_large"}},
      {.name = "EfficientNet",
       .members = {"efficientnet_b0", "efficientnet_v2_s"},
       .trained = {"efficientnet_b0", "efficientnet_v2_s"},
       .others = {"efficientnet_b1", "efficientnet_b2", "efficientnet_b3", "efficientnet_b4",
                  "efficientnet_b5", "efficientnet_b6", "efficientnet_b7", "efficientnet_v2_m",
                  "efficientnet_v2_l"}},
      {.name = "DenseNet",
       .members = {"densenet121"},
       .trained = {"densenet121"},
       .others = {"densenet161", "densenet169", "densenet201"}},
      {.name = "RegNet",
       .members = {"regnet_x_400mf", "regnet_y_400mf"},
       .trained = {"regnet_y_400mf", "regnet_x_400mf"},
       .others = {"regnet_x_800mf", "regnet_y_800mf", "regnet_x_1_6gf", "regnet_x_3_2gf",
                  "regnet_x_8gf", "regnet_x_16gf", "regnet_x_32gf", "regnet_y_1_6gf",
                  "regnet_y_3_2gf", "regnet_y_8gf", "regnet_y_16gf", "regnet_y_32gf",
                  "regnet_y_128gf"}},
      {.name = "ConvNeXt",
       .members = {"convnext_tiny"},
       .trained = {"convnext_tiny"},
       .others = {"convnext_small", "convnext_base", "convnext_large"},
       .synchronises = false},
      {.name = "ShuffleNet",
       .members = {"shufflenet_v2_x0_5"},
       .trained = {"shufflenet_v2_x0_5"},
       .others = {"shufflenet_v2_x1_0", "shufflenet_v2_x1_5", "shufflenet_v2_x2_0"}},
      {.name = "MnasNet",
       .members = {"mnasnet0_5"},
       .trained = {"mnasnet0_5"},
       .others = {"mnasnet0_75", "mnasnet1_0", "mnasnet1_3"}},
      {.name = "SqueezeNet",
       .members = {"squeezenet1_0", "squeezenet1_1"},
       .trained = {"squeezenet1_1"},
       .synchronises = false},
      {.name = "Inception",
       .members = {"googlenet"},
       .trained = {"googlenet"},
       .others = {"googlenet:aux_logits=false", "inception_v3:aux_logits=false", "inception_v3"},
       .others_trained = {"inception_v3:aux_logits=false", "inception_v3"},
       .evaluated_side = 96,
       .trained_side = 96,
       .aux_weight = 0.3,
       .most_counted = 6},
      {.name = "Segmentation",
       .members = {"deeplabv3_mobilenet_v3_large:aux_loss=true", "lraspp_mobilenet_v3_large"},
       .trained = {"deeplabv3_mobilenet_v3_large:aux_loss=true", "lraspp_mobilenet_v3_large"},
       .others = {"fcn_resnet50:aux_loss=true", "fcn_resnet50", "fcn_resnet101:aux_loss=true",
                  "deeplabv3_resnet50", "deeplabv3_resnet50:aux_loss=true",
                  "deeplabv3_resnet101:aux_loss=true"},
       .others_trained = {"deeplabv3_resnet50:aux_loss=true", "fcn_resnet50"},
       .classes = 21,
       .aux_weight = 0.5,
       .most_counted = 200},
      {.name = "Detection",
       .members = {"retinanet_resnet18_fpn"},
       .trained = {"retinanet_resnet18_fpn"},
       .others = {"fcos_resnet50_fpn", "retinanet_resnet50_fpn", "retinanet_resnet50_fpn_v2"},
       .others_trained = {"fcos_resnet50_fpn", "retinanet_resnet50_fpn",
                          "retinanet_resnet50_fpn_v2"},
       .classes = 91,
       .most_counted = -1},
      // Their Python versions are in other_networks.py.
      {.name = "OtherSegmentation",
       .members = {"unet"},
       .trained = {"unet"},
       .others = {"pspnet_resnet50:aux_loss=true", "deeplabv3plus_resnet50", "pspnet_resnet50",
                  "pspnet_resnet101:aux_loss=true", "deeplabv3plus_resnet101"},
       .others_trained = {"pspnet_resnet50:aux_loss=true", "deeplabv3plus_resnet50"},
       .recomputes = false,
       .classes = 21,
       .aux_weight = 0.5},
  };
  return all;
}

/// Each family's other networks in a list of its own.
std::vector<std::vector<Family>> families_of_others() {
  std::vector<std::vector<Family>> all;
  for (Family family : families()) {
    if (family.others.empty()) continue;
    family.members = std::exchange(family.others, {});
    family.trained = std::exchange(family.others_trained, {});
    if (family.name == "Inception") family.trained_side = 299;  // inception_v3 needs it
    all.push_back({family});
  }
  return all;
}

/// The output of torchvision_models.py for one network.
struct Reference {
  int64_t parameters = 0;  ///< 0: torchvision has no weights for it
  double giga_multiply_adds = 0;
  int64_t image_size = 0;
  std::vector<std::string> entries;  ///< kind, name, shape and checksum of parameters, then buffers
  std::vector<double> logits;        ///< for a detector, all predictions
  double loss = 0;
  struct Gradient {
    double product = 0, squares = 0;
  };
  std::map<std::string, Gradient> gradients;
};

std::map<std::string, Reference> read_references(const std::string& text) {
  std::map<std::string, Reference> references;
  std::map<std::string, std::vector<std::string>> buffers;
  std::string model;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string kind;
    words >> kind;
    Reference& reference = references[model];
    if (kind == "model") {
      words >> model;
    } else if (kind == "meta") {
      words >> reference.parameters >> reference.giga_multiply_adds >> reference.image_size;
    } else if (kind == "param") {
      reference.entries.push_back(line);
    } else if (kind == "buffer") {
      buffers[model].push_back(line);
    } else if (kind == "logits") {
      for (double logit = 0; words >> logit;) reference.logits.push_back(logit);
    } else if (kind == "loss") {
      words >> reference.loss;
    } else if (kind == "grad") {
      std::string name;
      words >> name;
      words >> reference.gradients[name].product >> reference.gradients[name].squares;
    }
  }
  for (auto& [name, lines_of] : buffers) {
    auto& entries = references[name].entries;
    entries.insert(entries.end(), lines_of.begin(), lines_of.end());
  }
  references.erase("");
  return references;
}

std::string entry(const char* kind, const std::string& name, const at::Tensor& tensor) {
  const at::Tensor values = tensor.detach().contiguous();
  return fmt::format(
      "{} {} {} {}", kind, name,
      tensor.dim() == 0 ? "scalar" : fmt::format("{}", fmt::join(tensor.sizes(), "x")),
      ::crc32_z(0, static_cast<const Bytef*>(values.const_data_ptr()), values.nbytes()));
}

/// The lines that torchvision_models.py prints about a network's parameters and buffers.
std::vector<std::string> entries_of(const Model& model) {
  std::vector<std::string> lines;
  for (const auto& item : model.named_parameters()) {
    lines.push_back(entry("param", item.key(), item.value()));
  }
  for (const auto& item : model.named_buffers()) {
    lines.push_back(entry("buffer", item.key(), item.value()));
  }
  return lines;
}

at::Tensor wave(at::IntArrayRef shape) {
  return at::sin(at::arange(c10::multiply_integers(shape), at::kDouble)).reshape(shape);
}

/// Fills weights with a variance of 2 / inputs, so that signals neither vanish nor explode, and
/// vectors with values other than 0 and 1. The same rules as in fill() of torchvision_models.py.
void fill(Model& model) {
  const at::NoGradGuard no_grad;
  const auto fill_one = [](const std::string& name, at::Tensor& tensor) {
    if (name.ends_with("num_batches_tracked")) return;
    const int64_t inputs = tensor.numel() / tensor.size(0);
    if (inputs > 1) {
      tensor.mul_(std::sqrt(2.0 / static_cast<double>(inputs)) / tensor.std().item<double>());
      return;
    }
    at::Tensor values = wave(tensor.sizes()).to(tensor.scalar_type());
    if (name.ends_with("running_var")) {
      values = values * values * 0.5 + 1;
    } else if (name.ends_with("weight")) {
      values = values * 0.1 + 1;
    } else {
      values = values * 0.1;
    }
    tensor.copy_(values);
  };
  for (auto& item : model.named_parameters()) fill_one(item.key(), item.value());
  for (auto& item : model.named_buffers()) fill_one(item.key(), item.value());
}

config::Component<ModelKind> from_yaml(const std::string& yaml) {
  return test::from_yaml<ModelKind>(yaml, "model");
}

/// @param member one of `family`
std::shared_ptr<Model> make(const Family& family, std::string member, ModelArgs args = {}) {
  if (const size_t colon = member.find(':'); colon != std::string::npos) {
    const size_t equals = member.find('=');
    member = fmt::format("{{type: {}, {}: {}}}", member.substr(0, colon),
                         member.substr(colon + 1, equals - colon - 1), member.substr(equals + 1));
  }
  args.num_classes = family.classes;
  args.sample_shape = {3, 299, 299};
  at::manual_seed(0);
  return from_yaml(member).make(args);
}

std::shared_ptr<Model> make_to_train(const Family& family, const std::string& member,
                                     const ModelArgs& args = {}) {
  auto model = make(family, member, args);
  model->to(at::kDouble);
  fill(*model);
  return model;
}

at::Tensor class_loss(const Family& family, const Model& model,
                      const std::vector<at::Tensor>& outputs) {
  const int64_t side = family.trained_side;
  const at::Tensor target =
      model.labels_pixels()
          ? at::arange(2 * side * side).reshape({2, side, side}).remainder(family.classes + 1)
          : at::tensor({1, 2}, at::kLong);
  at::Tensor loss;
  for (const at::Tensor& logits : outputs) {
    const at::Tensor one = at::cross_entropy_loss(logits, target, {}, at::Reduction::Mean,
                                                  /*ignore_index=*/family.classes);
    loss = loss.defined() ? loss + family.aux_weight * one : one;
  }
  return loss;
}

/// The boxes of detection_loss() in torchvision_models.py.
at::Tensor detection_target(double side) {
  at::Tensor target = at::full({2, 4, 5}, -1., at::kDouble);
  target[0] = at::tensor({0.,  side, side, side, side,  //
                          1.,  5.3,  10.1, 60.2, 71.7,  //
                          2.,  30.4, 20.9, 94.5, 50.6,  //
                          90., 8.8,  7.7,  24.1, 31.2},
                         at::kDouble)
                  .reshape({4, 5});
  return target;
}

/// A forward and a backward pass of two images. @return the loss
double train(const Family& family, Model& model) {
  at::manual_seed(1);  // for dropout and stochastic depth
  const int64_t side = family.trained_side;
  const auto outputs = model.forward_all(wave({2, 3, side, side}));
  const auto* const detector = dynamic_cast<const Detector*>(&model);
  const at::Tensor loss = detector != nullptr
                              ? detector->loss(outputs, detection_target(static_cast<double>(side)))
                              : class_loss(family, model, outputs);
  loss.backward();
  return loss.item<double>();
}

struct Actual {
  std::vector<std::string> entries;
  at::Tensor logits;
  int64_t parameters = 0;
};

/// The logits, or all predictions of a detector.
at::Tensor predictions_of(const Model& model, std::vector<at::Tensor> outputs) {
  if (dynamic_cast<const Detector*>(&model) == nullptr) {
    EXPECT_EQ(outputs.size(), 1U) << "auxiliary heads are for training";
  } else {
    std::erase_if(outputs, [](const at::Tensor& output) { return output.dim() == 2; });  // anchors
  }
  for (at::Tensor& output : outputs) output = output.flatten();
  return at::cat(outputs);
}

Actual evaluate(const Family& family, const std::string& name) {
  const at::NoGradGuard no_grad;
  const auto model = make(family, name);
  Actual actual;
  actual.entries = entries_of(*model);
  for (const at::Tensor& parameter : model->parameters()) actual.parameters += parameter.numel();
  if (actual.parameters > kMostEvaluated) return actual;
  fill(*model);
  model->eval();
  const int64_t side = family.evaluated_side;
  const at::Tensor logits =
      predictions_of(*model, model->forward_all(wave({1, 3, side, side}).to(at::kFloat)));
  const int64_t step = std::max<int64_t>(1, logits.numel() / 1000);
  actual.logits = logits.slice(0, 0, std::nullopt, step);
  return actual;
}

void expect_same(const Family& family, const std::string& name, const Actual& actual,
                 const Reference& reference) {
  EXPECT_EQ(actual.entries, reference.entries);
  if (reference.parameters > 0) {
    EXPECT_EQ(actual.parameters, reference.parameters);
  }
  if (actual.parameters > kMostEvaluated) return;
  ASSERT_EQ(actual.logits.size(0), static_cast<int64_t>(reference.logits.size()));
  const at::Tensor expected = at::tensor(reference.logits, at::kDouble);
  EXPECT_LE((actual.logits.to(at::kDouble) - expected).abs().max().item<double>(),
            kEvaluationTolerance * expected.abs().max().item<double>());
  EXPECT_GT(expected.std().item<double>(), 1e-3) << "the check would not say much";

  if (reference.parameters == 0 || reference.giga_multiply_adds > family.most_counted) return;
  const int64_t work =
      train::multiply_adds(*make(family, name), {3, reference.image_size, reference.image_size});
  EXPECT_NEAR(static_cast<double>(work) / 1e9, reference.giga_multiply_adds, 0.0011);
}

struct Trained {
  double loss = 0;
  std::shared_ptr<Model> model;
};

void expect_same(const Trained& actual, const Reference& reference) {
  EXPECT_NEAR(actual.loss, reference.loss, kTrainingTolerance * reference.loss);
  double largest = 0;
  for (const auto& [name, gradient] : reference.gradients) {
    largest = std::max(largest, std::sqrt(gradient.squares));
  }
  EXPECT_GT(largest, 0);
  ASSERT_EQ(actual.model->parameters().size(), reference.gradients.size());
  for (const auto& item : actual.model->named_parameters()) {
    const at::Tensor parameter = item.value().detach();
    const at::Tensor& gradient = item.value().grad();
    const Reference::Gradient& expected = reference.gradients.at(item.key());
    EXPECT_NEAR(gradient.norm().item<double>(), std::sqrt(expected.squares),
                kTrainingTolerance * largest)
        << item.key();
    EXPECT_NEAR((gradient * parameter).sum().item<double>(), expected.product,
                kTrainingTolerance * largest * parameter.norm().item<double>())
        << item.key();
  }
}

/// The command that prints the references of the families.
std::vector<std::string> reference_command(const std::vector<Family>& families) {
  std::vector<std::string> command = {test::python(),
                                      SYNCBN_SOURCE_DIR "/tests/models/torchvision_models.py"};
  for (const Family& family : families) {
    for (const auto& [option, members] :
         {std::pair("--initial", &family.members), std::pair("--trained", &family.trained)}) {
      command.emplace_back(option);
      command.insert(command.end(), members->begin(), members->end());
    }
    for (const std::string& option : {fmt::format("--classes={}", family.classes),
                                      fmt::format("--evaluated_side={}", family.evaluated_side),
                                      fmt::format("--trained_side={}", family.trained_side),
                                      fmt::format("--aux_weight={}", family.aux_weight)}) {
      command.push_back(option);
    }
    command.emplace_back("--end");
  }
  return command;
}

/// Of several families, because starting Python with torchvision takes seconds.
class TorchvisionFamilyTest : public ::testing::TestWithParam<std::vector<Family>> {};

TEST_P(TorchvisionFamilyTest, MatchTorchvisionInParametersInitialValuesLogitsAndGradients) {
  SYNCBN_SKIP_UNLESS(test::python_has("torchvision"), "torchvision");
  at::set_num_threads(1);
  // Runs at the same time as the test.
  test::Program python(reference_command(GetParam()), {.timeout_seconds = 500});

  std::map<std::string, Actual> evaluated;
  std::map<std::string, Trained> trained;
  for (const Family& family : GetParam()) {
    for (const std::string& name : family.members) evaluated[name] = evaluate(family, name);
    for (const std::string& name : family.trained) {
      trained[name].model = make_to_train(family, name);
      trained[name].loss = train(family, *trained[name].model);
    }
  }

  const test::ProgramResult ended = python.wait();
  ASSERT_EQ(ended.exit_code, 0) << ended.err;
  const auto references = read_references(ended.out);
  for (const Family& family : GetParam()) {
    for (const std::string& name : family.members) {
      SCOPED_TRACE(name);
      ASSERT_TRUE(references.contains(name));
      expect_same(family, name, evaluated.at(name), references.at(name));
      if (trained.contains(name)) expect_same(trained.at(name), references.at(name));
    }
  }
}

class TorchvisionTrainedTest : public ::testing::TestWithParam<Family> {
 protected:
  void SetUp() override { at::set_num_threads(1); }
};

TEST_P(TorchvisionTrainedTest, GivesTheSameGradientsWhenItRecomputes) {
  const Family& family = GetParam();
  const std::string& name = family.trained.front();
  if (!family.recomputes) {
    EXPECT_THAT([&] { make(family, name, {.activation_checkpointing = true}); },
                ::testing::ThrowsMessage<base::UserError>(
                    ::testing::HasSubstr(name + " has no blocks to compute again")));
    return;
  }
  for (const bool is_frozen : {false, true}) {
    SCOPED_TRACE(is_frozen ? "the first half is frozen" : "");
    const auto make_one = [&](const ModelArgs& args) {
      auto model = make_to_train(family, name, args);
      auto parameters = model->parameters();
      if (is_frozen) parameters.resize(parameters.size() / 2);
      for (const at::Tensor& parameter : parameters) parameter.set_requires_grad(!is_frozen);
      return model;
    };
    const auto plain = make_one({});
    const auto recomputing = make_one({.activation_checkpointing = true});
    EXPECT_DOUBLE_EQ(train(family, *plain), train(family, *recomputing));
    const auto parameters = plain->named_parameters();
    double largest = 0;
    for (const auto& item : parameters) {
      const at::Tensor& gradient = item.value().grad();
      if (gradient.defined()) largest = std::max(largest, gradient.abs().max().item<double>());
    }
    for (const auto& item : recomputing->named_parameters()) {
      const at::Tensor& gradient = item.value().grad();
      ASSERT_EQ(gradient.defined(), item.value().requires_grad()) << item.key();
      if (!gradient.defined()) continue;
      EXPECT_TRUE(at::allclose(gradient, parameters[item.key()].grad(), 1e-9, 1e-12 * largest))
          << item.key();
    }
  }
}

TEST_P(TorchvisionTrainedTest, SynchronisedNormHasTheSameEntriesAndResults) {
  if (!GetParam().synchronises) return;
  std::vector<std::vector<std::string>> entries;
  std::vector<double> losses;
  for (const Norm norm : {Norm::kLocal, Norm::kSync}) {
    const auto model = make_to_train(GetParam(), GetParam().trained.front(), {.norm = norm});
    entries.push_back(entries_of(*model));
    losses.push_back(train(GetParam(), *model));
  }
  EXPECT_EQ(entries[1], entries[0]);
  EXPECT_NEAR(losses[1], losses[0], kTrainingTolerance * losses[0]);
}

/// The logits of two images in training, after seeding with 1 and with 2.
std::pair<at::Tensor, at::Tensor> logits_of_two_seeds(const std::string& yaml) {
  const at::NoGradGuard no_grad;
  const ModelArgs args{.num_classes = 3, .sample_shape = {3, 64, 64}};
  const auto model = from_yaml(yaml).make(args);
  fill(*model);
  const auto forward = [&](uint64_t seed) {
    at::manual_seed(seed);
    return model->forward(wave({2, 3, 64, 64}).to(at::kFloat));
  };
  return {forward(1), forward(2)};
}

TEST(TorchvisionTest, DropoutAndStochasticDepthAreOptions) {
  at::set_num_threads(1);
  const std::vector<std::string> regularized = {
      "vgg11",
      "mobilenet_v2",
      "mobilenet_v3_small",
      "mnasnet0_5",
      "squeezenet1_1",
      "{type: densenet121, dropout: 0.5}",
      "{type: regnet_x_400mf, dropout: 0.5}",
      "{type: shufflenet_v2_x0_5, dropout: 0.5}",
      "{type: efficientnet_b0, stochastic_depth: 0}",
      "{type: efficientnet_b0, dropout: 0, stochastic_depth: 0.5}",
      "{type: convnext_tiny, dropout: 0.5, stochastic_depth: 0}",
      "{type: convnext_tiny, stochastic_depth: 0.9}",
      "{type: resnet20, stochastic_depth: 0.9}"};
  for (const std::string& yaml : regularized) {
    const auto [first, second] = logits_of_two_seeds(yaml);
    EXPECT_FALSE(first.equal(second)) << yaml;
  }
  const std::vector<std::string> plain = {
      "{type: vgg11, dropout: 0}",
      "{type: mobilenet_v2, dropout: 0}",
      "{type: mobilenet_v3_small, dropout: 0}",
      "{type: mnasnet0_5, dropout: 0}",
      "{type: squeezenet1_1, dropout: 0}",
      "densenet121",
      "regnet_x_400mf",
      "shufflenet_v2_x0_5",
      "{type: efficientnet_b0, dropout: 0, stochastic_depth: 0}",
      "{type: convnext_tiny, stochastic_depth: 0}",
      "resnet20"};
  for (const std::string& yaml : plain) {
    const auto [first, second] = logits_of_two_seeds(yaml);
    EXPECT_TRUE(first.equal(second)) << yaml;
  }
}

TEST(TorchvisionTest, DenseNetLoadsWeightsWithTheNamesOfThePublishedOnes) {
  const auto saved = from_yaml("densenet121").make(ModelArgs{});
  StateDict old;
  for (const auto& item : state_dict(*saved)) {
    std::string name = item.key();
    const size_t layer = name.find("denselayer");
    for (const char* const kind : {".norm", ".conv"}) {
      const size_t begin = layer == std::string::npos ? layer : name.find(kind, layer);
      if (begin != std::string::npos) name.insert(begin + 5, ".");
    }
    old.insert(name, item.value());
  }
  ASSERT_TRUE(old.contains("features.denseblock4.denselayer16.norm.2.running_var"));
  ASSERT_TRUE(old.contains("features.conv0.weight"));
  const auto loaded = from_yaml("densenet121").make(ModelArgs{});
  load_state_dict(*loaded, old);
  const auto parameters = saved->named_parameters();
  for (const auto& item : loaded->named_parameters()) {
    EXPECT_TRUE(item.value().equal(parameters[item.key()])) << item.key();
  }
}

TEST(TorchvisionTest, EveryNetworkIsCompared) {
  // Networks that torchvision lacks.
  std::vector<std::string> names = {"dcgan",    "digits",   "resnet20",  "resnet32",
                                    "resnet44", "resnet56", "resnet110", "torchscript"};
  for (const Family& family : families()) {
    for (const auto* const members : {&family.members, &family.others}) {
      for (const std::string& member : *members) {
        const std::string name = member.substr(0, member.find(':'));
        if (std::ranges::find(names, name) == names.end()) names.push_back(name);
      }
    }
  }
  EXPECT_THAT(ModelKind::registry().names(), ::testing::UnorderedElementsAreArray(names));
}

std::string name_of(const ::testing::TestParamInfo<Family>& info) {
  return info.param.name;
}

/// families()[begin, end).
std::vector<Family> some_families(size_t begin, size_t end) {
  return {families().data() + begin, families().data() + end};
}

// Parts of the families, which ctest runs in parallel. All take about equally long.
INSTANTIATE_TEST_SUITE_P(Models0, TorchvisionFamilyTest, ::testing::Values(some_families(0, 3)));
INSTANTIATE_TEST_SUITE_P(Models1, TorchvisionFamilyTest, ::testing::Values(some_families(3, 7)));
INSTANTIATE_TEST_SUITE_P(Models2, TorchvisionFamilyTest, ::testing::Values(some_families(7, 12)));
INSTANTIATE_TEST_SUITE_P(Models3, TorchvisionFamilyTest,
                         ::testing::Values(some_families(12, families().size())));
INSTANTIATE_TEST_SUITE_P(Models0, TorchvisionTrainedTest, ::testing::ValuesIn(some_families(0, 7)),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Models1, TorchvisionTrainedTest,
                         ::testing::ValuesIn(some_families(7, families().size())), name_of);
INSTANTIATE_TEST_SUITE_P(Exhaustive, TorchvisionFamilyTest,
                         ::testing::ValuesIn(families_of_others()),
                         [](const auto& info) { return info.param.front().name; });

}  // namespace
}  // namespace syncbn::models
