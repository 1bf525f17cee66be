#pragma once

#include <cstdint>

#include <syncbn/models/model.h>

#include "records/run_folder.h"

namespace syncbn::train {

/// Logs a histogram of each parameter ("parameters/NAME") and, if it has one, of its gradient in
/// the last step ("gradients/NAME").
void log_histograms(const models::Model& model, int64_t step, RunFolder& folder);

}  // namespace syncbn::train
