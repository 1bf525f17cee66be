#include <gtest/gtest.h>

#include <cmath>

#include "train/optimizer_support.h"

namespace syncbn::train {
namespace {

/// Copies of all tensors that a step changes.
std::vector<at::Tensor> everything(const Optimizer& mine, const NamedTensors& parameters) {
  std::vector<at::Tensor> all;
  for (const auto& [name, parameter] : parameters) all.push_back(parameter.detach().clone());
  for (const auto& [name, state] : mine.state()) {
    for (const auto& [key, tensor] : state) all.push_back(tensor.clone());
  }
  return all;
}

TEST(FoundInfTest, NothingChangesWhenFoundInfIsSet) {
  for (const char* yaml : kKinds) {
    const NamedTensors parameters = make_parameters();
    const auto mine = optimizer(yaml, parameters);
    set_gradients(parameters, 0), mine->step(0.1);
    const std::vector<at::Tensor> before = everything(*mine, parameters);
    for (const double found : {1.0, 3.0}) {
      parameters[0].second.mutable_grad() = at::full({3, 4}, INFINITY);
      mine->step(0.1, at::scalar_tensor(found));
      const std::vector<at::Tensor> after = everything(*mine, parameters);
      ASSERT_EQ(before.size(), after.size());
      for (size_t i = 0; i < before.size(); ++i) {
        EXPECT_TRUE(at::equal(before[i], after[i])) << yaml << " " << i;
      }
    }
  }
}

TEST(FoundInfTest, SkippedStepsDoNotCount) {
  for (const char* yaml : kKinds) {
    const NamedTensors skipping = make_parameters();
    const NamedTensors plain = make_parameters();
    const auto one = optimizer(yaml, skipping);
    const auto other = optimizer(yaml, plain);
    int64_t batch = 0;
    // The first step is skipped as well.
    for (const double found : {1, 0, 0, 1, 0}) {
      set_gradients(skipping, found == 0 ? batch : 1000);
      one->step(0.1, at::scalar_tensor(found));
      if (found != 0) continue;
      set_gradients(plain, batch++), other->step(0.1);
    }
    for (size_t i = 0; i < plain.size(); ++i) {
      EXPECT_TRUE(at::equal(skipping[i].second, plain[i].second)) << yaml;
    }
  }
}

}  // namespace
}  // namespace syncbn::train
