#pragma once

#include "batch_norm/batch_norm_kernels.h"

namespace syncbn::dist::detail {

const BatchNormKernels& batch_norm_kernels_cpu();

}  // namespace syncbn::dist::detail
