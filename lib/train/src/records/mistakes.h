#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace syncbn::train {

/// A sample whose class the network got wrong.
struct Mistake {
  int64_t sample = 0;  ///< its index in the data set
  int64_t label = 0;
  int64_t answer = 0;
  double loss = 0;
};

/// The mistakes of all ranks with the highest losses: at most 24, worst first, the same for any
/// number of ranks. Every rank calls it.
/// @param verdicts Task::verdicts() of this rank's samples, on the host
/// @param samples their indices in the data set
std::vector<Mistake> worst_mistakes(const at::Tensor& verdicts,
                                    const std::vector<int64_t>& samples);

/// mistakes.csv: sample,label,answer,loss,name.
/// @param classes their names
/// @param name_of the file or position of a sample
std::string mistakes_table(const std::vector<Mistake>& mistakes,
                           const std::vector<std::string>& classes,
                           const std::function<std::string(int64_t sample)>& name_of);

}  // namespace syncbn::train
