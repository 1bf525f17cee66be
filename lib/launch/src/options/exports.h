#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "job/environment.h"

namespace syncbn::launch {

/// What of the head's environment goes to the nodes on other machines unless --export says more:
/// what finds programs and libraries, and what steers the libraries that training runs use. Of the
/// rest much holds for one machine only, and some is secret.
inline constexpr std::array kDefaultExports{"PATH",         "LD_LIBRARY_PATH",
                                            "PYTHON*",      "VIRTUAL_ENV",
                                            "CONDA_PREFIX", "CONDA_DEFAULT_ENV",
                                            "CUDA_*",       "!CUDA_VISIBLE_DEVICES",
                                            "NCCL_*",       "GLOO_*",
                                            "UCX_*",        "FI_*",
                                            "TORCH_*",      "PYTORCH_*",
                                            "OMP_*",        "KMP_*",
                                            "GOMP_*",       "MKL_*",
                                            "OPENBLAS_*",   "SYNCBN_*"};

/// Whether some variable's name could fit to it, as one of the patterns below.
bool is_export_pattern(std::string_view word);

/// Whether a variable is one of those that `patterns` name, of which the last that fits counts:
/// NAME, PREFIX_* (as file names in a shell), and !NAME for one that is not.
bool is_exported(const std::string& name, const std::vector<std::string>& patterns);

/// The variables of this process that go along.
/// @param more patterns after those above.
Variables exported_variables(const std::vector<std::string>& more);

}  // namespace syncbn::launch
