#include <gtest/gtest.h>
#include <torch/version.h>

#include "support/program.h"
#include "support/python.h"
#include "support/skip.h"
#include "train/optimizer_support.h"

namespace syncbn::train {
namespace {

/// Runs five steps of each of Python's optimizers, on the parameters and gradients of
/// optimizer_support.h. Prints a line per optimizer: the bits of the parameters' elements as
/// integers.
constexpr const char* kFiveSteps = R"(
import sys, torch
for optimizer in sys.argv[1:]:
    torch.manual_seed(1)
    parameters = [torch.randn(shape).requires_grad_() for shape in ((3, 4), (4,))]
    optimizer = eval("torch.optim." + optimizer)
    for step in range(5):
        torch.manual_seed(100 + step)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape)
        optimizer.step()
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
    print(*flat.view(torch.int32).tolist())
)";

std::string five_steps(const std::string& yaml) {
  const NamedTensors parameters = make_parameters();
  const auto mine = optimizer(yaml, parameters);
  for (int64_t step = 0; step < 5; ++step) {
    set_gradients(parameters, step);
    mine->step(mine->base_lr());
  }
  const at::Tensor bits =
      at::cat({parameters[0].second.detach().flatten(), parameters[1].second.detach()})
          .view(at::kInt);
  const int32_t* values = bits.const_data_ptr<int32_t>();
  return fmt::format("{}\n", fmt::join(values, values + bits.numel(), " "));
}

/// Whether Python's torch has the version of this test's libtorch. Other versions may round
/// differently.
bool python_has_this_torch() {
  return test::python_torch_version() == TORCH_VERSION;
}

/// Compares our optimizers with Python's. Each pair is a configuration and a Python expression.
void expect_equal_bits(const std::vector<std::pair<std::string, std::string>>& pairs) {
  std::vector<std::string> command = {test::python(), "-c", kFiveSteps};
  for (const auto& [yaml, python] : pairs) command.push_back(python);
  const auto result = test::run_program(command);
  ASSERT_EQ(result.exit_code, 0) << result.err;
  std::istringstream lines(result.out);
  for (const auto& [yaml, python] : pairs) {
    std::string line;
    std::getline(lines, line);
    EXPECT_EQ(five_steps(yaml), line + "\n") << yaml << " and " << python;
  }
}

TEST(OptimizerPythonTest, SgdEqualsPythonsBitForBit) {
  SYNCBN_SKIP_UNLESS(python_has_this_torch(), "python-torch");
  expect_equal_bits({
      {"{type: sgd, lr: 0.1, fused: false}", "SGD(parameters, 0.1)"},
      {"{type: sgd, lr: 0.1, momentum: 0.9, weight_decay: 0.01, fused: false}",
       "SGD(parameters, 0.1, 0.9, weight_decay=0.01, foreach=True)"},
      {"{type: sgd, lr: 0.1, momentum: 0.9, nesterov: true, fused: false}",
       "SGD(parameters, 0.1, 0.9, nesterov=True)"},
      {"{type: sgd, lr: 0.1, momentum: 0.9, dampening: 0.3, fused: false}",
       "SGD(parameters, 0.1, 0.9, dampening=0.3)"},
      {"{type: sgd, lr: 0.1, momentum: 0.9, weight_decay: 0.01}",
       "SGD(parameters, 0.1, 0.9, weight_decay=0.01, fused=True)"},
      {"{type: sgd, lr: 0.1, momentum: 0.9, dampening: 0.3, weight_decay: 0.01}",
       "SGD(parameters, 0.1, 0.9, dampening=0.3, weight_decay=0.01, fused=True)"},
      {"{type: sgd, lr: 0.1, weight_decay: 0.01}",
       "SGD(parameters, 0.1, weight_decay=0.01, fused=True)"},
  });
}

TEST(OptimizerPythonTest, AdamEqualsPythonsBitForBit) {
  SYNCBN_SKIP_UNLESS(python_has_this_torch(), "python-torch");
  expect_equal_bits({
      {"{type: adam, lr: 0.01, fused: false}", "Adam(parameters, 0.01)"},
      {"{type: adam, betas: [0.8, 0.95], eps: 0.001, weight_decay: 0.1, fused: false}",
       "Adam(parameters, betas=(0.8, 0.95), eps=0.001, weight_decay=0.1, foreach=True)"},
      {"{type: adam, lr: 0.01, weight_decay: 0.1, amsgrad: true, fused: false}",
       "Adam(parameters, 0.01, weight_decay=0.1, amsgrad=True)"},
      {"{type: adam, lr: 0.01, weight_decay: 0.1}",
       "Adam(parameters, 0.01, weight_decay=0.1, fused=True)"},
      {"{type: adam, lr: 0.01, amsgrad: true}", "Adam(parameters, 0.01, amsgrad=True, fused=True)"},
      {"{type: adamw, lr: 0.01, fused: false}", "AdamW(parameters, 0.01, foreach=True)"},
      {"{type: adamw, lr: 0.01, fused: false}", "AdamW(parameters, 0.01)"},
      {"{type: adamw, lr: 0.01, weight_decay: 0, amsgrad: true, fused: false}",
       "AdamW(parameters, 0.01, weight_decay=0, amsgrad=True)"},
      {"{type: adamw, lr: 0.01}", "AdamW(parameters, 0.01, fused=True)"},
      {"{type: adamw, lr: 0.01, amsgrad: true}",
       "AdamW(parameters, 0.01, amsgrad=True, fused=True)"},
  });
}

TEST(OptimizerPythonTest, RmspropEqualsPythonsBitForBit) {
  SYNCBN_SKIP_UNLESS(python_has_this_torch(), "python-torch");
  expect_equal_bits({
      {"rmsprop", "RMSprop(parameters)"},
      {"{type: rmsprop, lr: 0.02, alpha: 0.9, eps: 0.001, weight_decay: 0.1}",
       "RMSprop(parameters, 0.02, 0.9, 0.001, 0.1)"},
      {"{type: rmsprop, momentum: 0.9}", "RMSprop(parameters, momentum=0.9)"},
      {"{type: rmsprop, momentum: 0.9, centered: true, weight_decay: 0.1}",
       "RMSprop(parameters, momentum=0.9, centered=True, weight_decay=0.1, foreach=True)"},
      {"{type: rmsprop, centered: true}", "RMSprop(parameters, centered=True)"},
  });
}

TEST(OptimizerPythonTest, GroupsEqualPythonsBitForBit) {
  SYNCBN_SKIP_UNLESS(python_has_this_torch(), "python-torch");
  const std::string weight = "{'params': parameters[:1]";
  const std::string bias = "}, {'params': parameters[1:]";
  const std::string groups =
      "groups: [{match: bias, lr: 0.2x, weight_decay: 0.5}, {match: w*, lr: 0.07}]";
  expect_equal_bits({
      {"{type: sgd, lr: 0.1, momentum: 0.9, weight_decay: 0.01, fused: false, " + groups + "}",
       "SGD([" + weight + ", 'lr': 0.07" + bias + ", 'lr': 0.1 * 0.2, 'weight_decay': 0.5}], " +
           "0.1, 0.9, weight_decay=0.01)"},
      {"{type: adam, lr: 0.01, weight_decay: 0.1, " + groups + "}",
       "Adam([" + weight + ", 'lr': 0.07" + bias + ", 'lr': 0.01 * 0.2, 'weight_decay': 0.5}], " +
           "0.01, weight_decay=0.1, fused=True)"},
      {"{type: adamw, lr: 0.01, no_decay: [bias], fused: false}",
       "AdamW([" + weight + bias + ", 'weight_decay': 0}], 0.01)"},
      {"{type: rmsprop, weight_decay: 0.1, no_decay: ['bi?s'], layer_decay: 0.7}",
       "RMSprop([" + weight + ", 'lr': 0.01 * 0.7" + bias + ", 'weight_decay': 0}], " +
           "weight_decay=0.1)"},
  });
}

/// Algorithm 2 of arXiv:1904.00962 with phi(x) = x, in float64. The arguments are lr, betas, eps,
/// weight decay, the largest gradient norm and the largest trust ratio (0: no limit).
constexpr const char* kLamb = R"(
import sys, torch
for case in sys.argv[1:]:
    lr, beta1, beta2, eps, decay, max_norm, max_ratio = map(float, case.split())
    torch.manual_seed(1)
    x = [torch.randn(shape).double() for shape in ((3, 4), (4,))]
    m = [torch.zeros_like(p) for p in x]
    v = [torch.zeros_like(p) for p in x]
    for t in range(1, 6):
        torch.manual_seed(99 + t)
        g = [torch.randn(p.shape).double() for p in x]
        norm = torch.cat([one.flatten() for one in g]).norm().item()
        scale = min(1, max_norm / norm) if max_norm else 1
        for i in range(len(x)):
            m[i] = beta1 * m[i] + (1 - beta1) * scale * g[i]
            v[i] = beta2 * v[i] + (1 - beta2) * (scale * g[i]) ** 2
            r = (m[i] / (1 - beta1**t)) / ((v[i] / (1 - beta2**t)) ** 0.5 + eps)
            u = r + decay * x[i]
            ratio = x[i].norm() / u.norm() if decay else 1
            x[i] = x[i] - lr * (min(ratio, max_ratio) if max_ratio else ratio) * u
    print(*torch.cat([p.flatten() for p in x]).tolist())
)";

TEST(OptimizerPythonTest, LambFollowsItsPaper) {
  SYNCBN_SKIP_UNLESS(python_has_this_torch(), "python-torch");
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"{type: lamb, lr: 0.02}", "0.02 0.9 0.999 1e-6 0.01 0 0"},
      {"{type: lamb, lr: 0.02, weight_decay: 0.3, max_grad_norm: 1}",
       "0.02 0.9 0.999 1e-6 0.3 1 0"},
      {"{type: lamb, betas: [0.8, 0.95], eps: 0.001, max_grad_norm: 2.5, trust_clip: true}",
       "0.001 0.8 0.95 0.001 0.01 2.5 1"},
      {"{type: lamb, weight_decay: 0}", "0.001 0.9 0.999 1e-6 0 0 0"},
  };
  std::vector<std::string> command = {test::python(), "-c", kLamb};
  for (const auto& [yaml, numbers] : cases) command.push_back(numbers);
  const auto result = test::run_program(command);
  ASSERT_EQ(result.exit_code, 0) << result.err;
  std::istringstream reference(result.out);
  for (const auto& [yaml, numbers] : cases) {
    for (const at::ScalarType type : {at::kDouble, at::kFloat}) {
      const auto position = reference.tellg();
      const NamedTensors parameters = make_parameters(type);
      const auto mine = optimizer(yaml, parameters);
      for (int64_t step = 0; step < 5; ++step) {
        set_gradients(parameters, step);
        mine->step(mine->base_lr());
      }
      for (const auto& [name, parameter] : parameters) {
        const at::Tensor values = parameter.detach().to(at::kDouble).flatten();
        for (int64_t i = 0; i < values.numel(); ++i) {
          double expected = 0;
          reference >> expected;
          EXPECT_NEAR(values[i].item<double>(), expected, type == at::kDouble ? 1e-14 : 1e-6)
              << yaml;
        }
      }
      if (type == at::kDouble) reference.seekg(position);
    }
  }
}

}  // namespace
}  // namespace syncbn::train
