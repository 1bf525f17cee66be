// Python's BatchNorm on the whole batch against SyncBatchNorm over ranks.

#include <gtest/gtest.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/dist/sync_batch_norm.h>

#include <optional>
#include <string>
#include <vector>

#include <ATen/Context.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/import.h>

#include "dist/group.h"
#include "dist/tensors.h"
#include "support/multiproc.h"
#include "support/program.h"
#include "support/python.h"
#include "support/skip.h"
#include "support/temp_folder.h"

namespace {

namespace dist = syncbn::dist;
using dist::SyncBatchNorm;
using dist::SyncBatchNormOptions;
using syncbn::test::close;
using syncbn::test::python;
using syncbn::test::python_has_torch;
using syncbn::test::run_group;
using syncbn::test::run_program;
using syncbn::test::run_ranks;
using syncbn::test::TempFolder;

constexpr int kPythonSteps = 3;
constexpr int64_t kShares[] = {1, 5, 2};  // samples of each rank
constexpr int64_t kBatch = 8;

struct PythonCase {
  std::vector<int64_t> sample;  ///< [C, ...]
  std::optional<double> momentum = 0.1;
  bool affine = true;
};

/// The inputs of batch_norm_reference.py.
torch::jit::Module make_inputs(const PythonCase& c) {
  at::manual_seed(5);
  torch::jit::Module inputs("Inputs");
  std::vector<int64_t> sizes{kBatch};
  sizes.insert(sizes.end(), c.sample.begin(), c.sample.end());
  for (int step = 0; step < kPythonSteps; ++step) {
    const std::string number = std::to_string(step);
    inputs.register_buffer("input" + number, at::randn(sizes, at::kDouble) * (step + 1) + step);
    inputs.register_buffer("grad" + number, at::randn(sizes, at::kDouble));
  }
  inputs.register_buffer("momentum", at::full({}, c.momentum.value_or(-1), at::kDouble));
  if (c.affine) {
    inputs.register_buffer("weight", at::randn({c.sample[0]}, at::kDouble));
    inputs.register_buffer("bias", at::randn({c.sample[0]}, at::kDouble));
  }
  return inputs;
}

void expect_as_python(const PythonCase& c, const std::string& given, const std::string& computed) {
  const torch::jit::Module inputs = torch::jit::load(given);
  const torch::jit::Module expected = torch::jit::load(computed);
  const auto input = [&](const std::string& name) { return inputs.attr(name).toTensor(); };
  int64_t begin = 0;
  for (int other = 0; other < dist::rank(); ++other) begin += kShares[other];
  const auto share = [&](const at::Tensor& all) {
    return all.narrow(0, begin, kShares[dist::rank()]);
  };
  const auto expect = [&](const at::Tensor& actual, const at::Tensor& value,
                          const std::string& name) {
    EXPECT_TRUE(close(actual, value, 1e-9, 1e-11)) << name;
  };
  SyncBatchNorm layer(SyncBatchNormOptions(c.sample[0]).momentum(c.momentum).affine(c.affine));
  layer->to(at::kDouble);
  if (c.affine) {
    const at::NoGradGuard no_grad;
    layer->weight.copy_(input("weight"));
    layer->bias.copy_(input("bias"));
  }
  for (int step = 0; step < kPythonSteps; ++step) {
    const std::string number = std::to_string(step);
    const at::Tensor x = share(input("input" + number)).clone().requires_grad_();
    const at::Tensor y = layer(x);
    y.backward(share(input("grad" + number)));
    expect(y, share(expected.attr("output" + number).toTensor()), "output" + number);
    expect(x.grad(), share(expected.attr("grad_input" + number).toTensor()), "gradient" + number);
  }
  if (c.affine) {
    for (const auto& [name, parameter] :
         {std::pair{"grad_weight", layer->weight}, std::pair{"grad_bias", layer->bias}}) {
      at::Tensor sum = parameter.grad().clone();
      dist::all_reduce(sum);
      expect(sum, expected.attr(name).toTensor(), name);
    }
  }
  for (const auto& buffer : layer->named_buffers()) {
    expect(buffer.value(), expected.attr(buffer.key()).toTensor(), buffer.key());
  }
}

void expect_as_python(const PythonCase& c) {
  const TempFolder folder;
  const std::string given = folder / "given.pt";
  const std::string computed = folder / "computed.pt";
  // In another process: saving may start threads, and this process still has to fork ranks.
  run_ranks(1, [&](int) { make_inputs(c).save(given); });
  const auto result = run_program(
      {python(), SYNCBN_SOURCE_DIR "/tests/dist/batch_norm_reference.py", given, computed});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  run_group(3, [&](int) { expect_as_python(c, given, computed); });
}

TEST(PythonBatchNormTest, OfTwoToFiveDimensions) {
  SYNCBN_SKIP_UNLESS(python_has_torch(), "python-torch");
  expect_as_python({.sample = {4}});
  expect_as_python({.sample = {4, 7}});
  expect_as_python({.sample = {4, 5, 6}});
  expect_as_python({.sample = {4, 2, 3, 5}});
}

TEST(PythonBatchNormTest, WithACumulativeAverageAndWithoutParameters) {
  SYNCBN_SKIP_UNLESS(python_has_torch(), "python-torch");
  expect_as_python({.sample = {4, 7}, .momentum = std::nullopt});
  expect_as_python({.sample = {4, 7}, .momentum = 1.0, .affine = false});
}

}  // namespace
