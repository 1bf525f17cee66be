#pragma once

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>

namespace syncbn::dist::detail {

/// Restores the state of a device's random generator on destruction: constructing a module draws
/// its initial values, and dropout draws in each forward.
class KeptRandomState {
 public:
  explicit KeptRandomState(at::Device device = at::kCPU)
      : generator_(at::globalContext().defaultGenerator(device)), state_(generator_.get_state()) {}
  ~KeptRandomState() { generator_.set_state(state_); }
  KeptRandomState(const KeptRandomState&) = delete;
  KeptRandomState& operator=(const KeptRandomState&) = delete;

 private:
  at::Generator generator_;
  at::Tensor state_;
};

}  // namespace syncbn::dist::detail
