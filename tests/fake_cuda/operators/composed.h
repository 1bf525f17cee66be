#pragma once

#include <torch/library.h>

#include <set>
#include <string>

namespace fake_cuda {

/// Registers operators that only CUDA has, or that no CPU kernel can stand in for, as compositions
/// of other operators. @return their names without "aten::"
std::set<std::string> register_composed(torch::Library& library);

}  // namespace fake_cuda
