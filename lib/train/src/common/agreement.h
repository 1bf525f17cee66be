#pragma once

#include <string>

#include <syncbn/train/inputs.h>

namespace syncbn::train {

/// Compares what all ranks were started with: program, configuration, data. Ranks that differ would
/// wait for each other's batches until a timeout, or train wrongly. Ignores keys that may_differ().
/// Every rank calls it.
/// @throws base::UserError on rank 0, QuietExit on the others, naming each difference and both
///   hosts
void check_agreement(const std::string& config_text, const Inputs& inputs);

}  // namespace syncbn::train
