#pragma once

// at::Device: where ranks exchange tensors.
#include <c10/core/Device.h>

namespace syncbn::train {

/// Sums over samples that make means when divided.
struct SampleSums {
  double loss = 0;
  double correct = 0;
  double samples = 0;

  /// Over all ranks. Every rank calls it.
  SampleSums reduced(at::Device device) const;
};

}  // namespace syncbn::train
