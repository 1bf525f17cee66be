#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace syncbn::dist {

using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

}  // namespace syncbn::dist
