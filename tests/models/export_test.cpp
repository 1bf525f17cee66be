#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/models/export.h>
#include <syncbn/models/torch_archive.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "support/from_yaml.h"
#include "support/program.h"
#include "support/python.h"
#include "support/skip.h"
#include "support/temp_folder.h"

namespace syncbn::models {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr int64_t kSide = 64;  // of images, in pixels
/// Larger networks take too long. They consist of the same layers as smaller ones.
constexpr int64_t kMaxParameters = 30'000'000;
constexpr size_t kParts = 12;  // parts of the exhaustive test, which ctest runs in parallel

/// One network of each kind; the exhaustive test has the others.
const std::set<std::string> kOneOfEach = {"convnext_tiny",
                                          "deeplabv3_mobilenet_v3_large",
                                          "densenet121",
                                          "digits",
                                          "efficientnet_b0",
                                          "googlenet",
                                          "lraspp_mobilenet_v3_large",
                                          "mnasnet0_5",
                                          "mobilenet_v2",
                                          "mobilenet_v3_small",
                                          "regnet_y_400mf",
                                          "resnet18",
                                          "retinanet_resnet18_fpn",
                                          "shufflenet_v2_x0_5",
                                          "squeezenet1_1"};

const ExportInfo kInfo = {.classes = {"ant", "bee", "cat", "dog"},
                          .mean = {0.5, 0.25, 0.125},
                          .std = {0.5, 1, 2},
                          .size = {3, kSide, kSide},
                          .transforms = R"([{"type":"resize","size":40}])"};

std::shared_ptr<Model> make(const std::string& name, int64_t side = kSide) {
  return test::from_yaml<ModelKind>(name, "model")
      .make(ModelArgs{.num_classes = 4, .sample_shape = {3, side, side}});
}

/// Gives biases and the vectors of batch norm values other than 0 and 1.
void vary_vectors(Model& model) {
  const at::NoGradGuard no_grad;
  for (const auto& tensors : {model.parameters(), model.buffers()}) {
    for (const at::Tensor& tensor : tensors) {
      if (tensor.dim() == 1)
        tensor.mul_(at::rand_like(tensor) + 0.5).add_(at::rand_like(tensor), 0.1);
    }
  }
}

/// @return whether the network is small enough
bool write_files(const test::TempFolder& folder, const std::string& name) {
  const at::NoGradGuard no_grad;
  at::manual_seed(0);
  const int64_t side = name == "inception_v3" ? 299 : kSide;
  const auto model = make(name, side);
  int64_t parameters = 0;
  for (const at::Tensor& parameter : model->parameters()) parameters += parameter.numel();
  if (parameters > kMaxParameters) return false;
  vary_vectors(*model);
  ExportInfo info = kInfo;
  info.size = {3, side, side};
  for (const ExportFormat format : {ExportFormat::kTorch, ExportFormat::kSafetensors,
                                    ExportFormat::kTorchScript, ExportFormat::kOnnx}) {
    export_model(folder / (name + extension(format)), format, *model, info);
  }
  Dict expected = make_dict();
  const at::Tensor images = at::randn({3, 3, side, side});  // more than in the traced example
  put(expected, "images", images);
  for (const at::Tensor& output : model->forward_all(images)) {
    put(expected, fmt::format("output_{}", expected.size()), on_host(output));
  }
  write_parts(folder / (name + ".expected"),
              [&](const Sink& sink) { write_torch_archive(expected, sink); });
  return true;
}

/// The networks of a part: part 0 has those of kOneOfEach, parts 1 to kParts the others.
std::vector<std::string> names_of_part(size_t part) {
  if (part == 0) return {kOneOfEach.begin(), kOneOfEach.end()};
  std::vector<std::string> others = ModelKind::registry().names();
  std::erase_if(others, [](const std::string& name) {
    return kOneOfEach.contains(name) || name == "torchscript" || name == "dcgan";
  });
  std::vector<std::string> names;
  for (size_t i = part - 1; i < others.size(); i += kParts) names.push_back(others[i]);
  return names;
}

class ExportedNetworksTest : public ::testing::TestWithParam<size_t> {};

TEST_P(ExportedNetworksTest, ComputeTheSameInPython) {
  SYNCBN_SKIP_UNLESS(test::python_has("onnx, onnxruntime, safetensors, torchvision"),
                     "python-onnx");
  at::set_num_threads(1);
  const test::TempFolder folder;
  std::vector<std::string> written;
  for (const std::string& name : names_of_part(GetParam())) {
    SCOPED_TRACE(name);
    if (write_files(folder, name)) {
      written.push_back(name);
    } else {
      EXPECT_FALSE(kOneOfEach.contains(name)) << "too large";
    }
  }
  std::vector<std::string> compare = {
      test::python(), SYNCBN_SOURCE_DIR "/tests/models/compare_exports.py", folder.path().string()};
  compare.insert(compare.end(), written.begin(), written.end());
  const auto compared = test::run_program(compare, {.timeout_seconds = 400});
  EXPECT_EQ(compared.exit_code, 0) << compared.err;
  for (const std::string& name : written) {
    EXPECT_THAT(compared.out, HasSubstr(name + " torchscript"));
  }
}

INSTANTIATE_TEST_SUITE_P(Models, ExportedNetworksTest, ::testing::Values(0));
INSTANTIATE_TEST_SUITE_P(Exhaustive, ExportedNetworksTest, ::testing::Range(size_t{1}, kParts + 1));

/// A convolution, followed by `step`.
class StepNet : public Model {
 public:
  using Step = at::Tensor (*)(const at::Tensor& x);

  explicit StepNet(Step step) : step_(step) {
    conv_ = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 4, 3)));
  }
  at::Tensor forward(at::Tensor x) override { return step_(conv_->forward(x)).mean({2, 3}); }

 private:
  Step step_;
  torch::nn::Conv2d conv_{nullptr};
};

TEST(ExportTest, AnOperatorThatOnnxLacksIsNamed) {
  const test::TempFolder folder;
  StepNet net([](const at::Tensor& x) { return at::celu(x); });
  EXPECT_THAT([&] { export_model(folder / "x.onnx", ExportFormat::kOnnx, net, kInfo); },
              ThrowsMessage<base::UserError>(
                  "cannot export to ONNX: aten::celu has no counterpart here (behind layer conv); "
                  "choose --format torchscript"));
  EXPECT_TRUE(folder.empty());
  export_model(folder / "x.pt", ExportFormat::kTorchScript, net, kInfo);
}

TEST(ExportTest, AChangedViewIsNotExportedToOnnx) {
  const test::TempFolder folder;
  StepNet net([](const at::Tensor& x) {
    const at::Tensor twice = x * 2;
    twice.slice(1, 0, 1).mul_(3);
    return twice;
  });
  EXPECT_THAT([&] { export_model(folder / "x.onnx", ExportFormat::kOnnx, net, kInfo); },
              ThrowsMessage<base::UserError>(
                  HasSubstr("aten::mul_ changes a view of another tensor (behind layer conv)")));
  StepNet whole([](const at::Tensor& x) { return (x * 2).mul_(3); });
  export_model(folder / "x.onnx", ExportFormat::kOnnx, whole, kInfo);
}

TEST(ExportTest, SamplesNeedNotBeImages) {
  class Linear : public Model {
   public:
    Linear() : layer_(register_module("layer", torch::nn::Linear(2, 3))) {}
    at::Tensor forward(at::Tensor x) override { return layer_(x); }

   private:
    torch::nn::Linear layer_;
  } net;
  ExportInfo info = kInfo;
  info.size = {2};
  const test::TempFolder folder;
  for (const ExportFormat format : {ExportFormat::kTorchScript, ExportFormat::kOnnx}) {
    const std::string file = folder / ("x" + extension(format));
    export_model(file, format, net, info);
    EXPECT_TRUE(std::filesystem::exists(file));
  }
}

TEST(ExportTest, ABranchOnTheNumberOfImagesIsNoticed) {
  const test::TempFolder folder;
  StepNet net([](const at::Tensor& x) { return x.size(0) > 1 ? x : x * 2; });
  EXPECT_THAT([&] { export_model(folder / "x.pt", ExportFormat::kTorchScript, net, kInfo); },
              ThrowsMessage<base::UserError>(HasSubstr("the network cannot be traced")));
  EXPECT_TRUE(folder.empty());
}

}  // namespace
}  // namespace syncbn::models
