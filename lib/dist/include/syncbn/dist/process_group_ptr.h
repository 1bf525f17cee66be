#pragma once

// c10d::ProcessGroup: what groups are, so that everything of c10d's interoperates.
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace syncbn::dist {

using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

}  // namespace syncbn::dist
