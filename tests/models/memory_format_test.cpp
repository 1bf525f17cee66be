#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <syncbn/dist/ddp.h>
#include <syncbn/models/digits_net.h>
#include <syncbn/models/memory_format.h>
#include <syncbn/models/resnet.h>
#include <torch/nn/modules/linear.h>

#include "support/multiproc.h"

namespace syncbn::models {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr auto kContiguous = at::MemoryFormat::Contiguous;
constexpr auto kChannelsLast = at::MemoryFormat::ChannelsLast;

std::shared_ptr<Model> small_resnet(at::MemoryFormat format) {
  at::manual_seed(0);
  auto model = resnet18({.num_classes = 4, .sample_shape = {3, 16, 16}}, {.small_input = true});
  to_memory_format(*model, format);
  return model;
}

at::Tensor images(at::MemoryFormat format) {
  at::manual_seed(1);
  return at::randn({4, 3, 16, 16}).contiguous(format);
}

TEST(MemoryFormatTest, FiltersAreConvertedInPlace) {
  const auto model = small_resnet(kContiguous);
  const auto before = model->named_parameters();
  to_memory_format(*model, kChannelsLast);
  const auto reference = small_resnet(kContiguous)->named_parameters();
  for (const auto& item : model->named_parameters()) {
    EXPECT_TRUE(item.value().is_same(before[item.key()])) << item.key();
    EXPECT_TRUE(item.value().equal(reference[item.key()])) << item.key();
    EXPECT_TRUE(item.value().requires_grad());
    EXPECT_TRUE(item.value().dim() != 4 || item.value().is_contiguous(kChannelsLast));
  }
}

TEST(MemoryFormatTest, OutputsAndGradientsAreTheSame) {
  const auto plain = small_resnet(kContiguous);
  const auto turned = small_resnet(kChannelsLast);
  // In float32, rounding moves values across a ReLU's threshold on some processors.
  for (const auto& model : {plain, turned}) model->to(at::kDouble);
  const at::Tensor expected = plain->forward(images(kContiguous).to(at::kDouble));
  const at::Tensor output = turned->forward(images(kChannelsLast).to(at::kDouble));
  EXPECT_TRUE(at::allclose(output, expected, 1e-4, 1e-4));
  expected.square().sum().backward();
  output.square().sum().backward();
  const auto parameters = plain->named_parameters();
  for (const auto& item : turned->named_parameters()) {
    const at::Tensor& gradient = parameters[item.key()].grad();
    const double scale = gradient.abs().max().item<double>();
    EXPECT_TRUE(at::allclose(item.value().grad(), gradient, 1e-3, 1e-3 * scale)) << item.key();
  }
}

TEST(MemoryFormatTest, ChannelsLastIsPreferredForConvolutions) {
  EXPECT_EQ(preferred_memory_format(*small_resnet(kContiguous)), kChannelsLast);
  EXPECT_EQ(preferred_memory_format(*digits_net({.num_classes = 10, .sample_shape = {1, 8, 8}})),
            kChannelsLast);
  EXPECT_EQ(preferred_memory_format(*torch::nn::Linear(2, 2)), kContiguous);
}

// The reducer copies a gradient and warns if its strides differ from those of its view of the
// bucket.
TEST(MemoryFormatTest, DdpKeepsTheLayoutOfGradientsWithoutAWarning) {
  const auto results = test::run_ranks_and_collect({.world_size = 2}, [](int) {
    dist::init_process_group();
    for (const bool view : {false, true}) {
      const auto model = small_resnet(kChannelsLast);
      dist::DistributedDataParallel<Model> ddp(model, {.gradient_as_bucket_view = view});
      for (int step = 0; step < 3; ++step) {
        ddp.zero_grad();
        ddp(images(kChannelsLast)).sum().backward();
      }
      for (const at::Tensor& parameter : model->parameters()) {
        EXPECT_TRUE(parameter.dim() != 4 || parameter.grad().is_contiguous(kChannelsLast));
      }
    }
    dist::destroy_process_group();
  });
  for (const auto& result : results) {
    EXPECT_EQ(result.exit_code, 0) << result.output;
    EXPECT_THAT(result.output, Not(HasSubstr("strides")));
  }
}

}  // namespace
}  // namespace syncbn::models
