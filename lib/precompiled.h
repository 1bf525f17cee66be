// Precompiled for all that uses libtorch (syncbn_precompile in cmake/SyncbnTargets.cmake): what
// most of those files read. No file relies on it: each includes what it uses, and the `dev` preset
// can be configured with CMAKE_DISABLE_PRECOMPILE_HEADERS=ON.
#pragma once
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
