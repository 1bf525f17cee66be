#pragma once

#include <memory>

#include "groups/cuda_support.h"

namespace syncbn::dist::detail {

std::unique_ptr<DeviceGraph> make_graph();

}  // namespace syncbn::dist::detail
