// For tests that run on CPUs and GPUs: they run on the CPU and once more, with the prefix "Gpu.",
// on the device that SYNCBN_TEST_DEVICE names (CMakeLists.txt).
#pragma once

#include <gtest/gtest.h>
#include <syncbn/base/env.h>
#include <syncbn/dist/process_group.h>

#include <functional>
#include <string>

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include "dist/gpus.h"
#include "dist/group.h"
#include "groups/world.h"
#include "support/skip.h"

namespace syncbn::test {

/// The device for the tensors of such a test's ranks. All ranks may share a GPU. The test's own
/// process must not use it: after initialising CUDA it cannot fork ranks.
inline at::Device device() {
  return at::Device(base::env("SYNCBN_TEST_DEVICE").value_or("cpu"));
}

/// The fixture of such a test.
class DeviceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!device().is_cuda()) return;
    SYNCBN_SKIP_UNLESS(gpus() > 0, "gpu");
    // By default cuDNN rounds the factors of convolutions to TF32, with 10 bits.
    at::globalContext().setAllowTF32CuDNN(false);
    at::globalContext().setAllowTF32CuBLAS(false);
  }
};

/// Like run_group(), over Gloo, since NCCL allows one rank per GPU.
inline void run_on_device(int world_size, const std::function<void(int rank)>& body) {
  run_group(world_size, {.backend = "gloo"}, body);
}

/// Draws the same numbers for any device.
inline at::Tensor randn(at::IntArrayRef sizes, at::ScalarType type = at::kFloat) {
  return at::randn(sizes, type).to(device());
}

inline at::Tensor zeros(at::IntArrayRef sizes, at::ScalarType type = at::kFloat) {
  return at::zeros(sizes, at::TensorOptions(type).device(device()));
}

inline at::Tensor ones(at::IntArrayRef sizes, at::ScalarType type = at::kFloat) {
  return at::ones(sizes, at::TensorOptions(type).device(device()));
}

/// Number of exchanges of batch norm's statistics so far; a single rank makes none.
/// @param group null: all ranks; the group is created at first use
inline uint64_t exchanges(const dist::ProcessGroupPtr& group = {}) {
  const auto over = dist::detail::statistics_group(group);
  return over ? dist::detail::backend_of(over)->sequence() : 0;
}

template <class Holder>
Holder on_device(Holder module) {
  module->to(device());
  return module;
}

}  // namespace syncbn::test
