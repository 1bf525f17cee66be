#pragma once

#include <string>
#include <string_view>

#include <syncbn/train/inputs.h>

namespace syncbn::train {

/// Compares what all ranks were started with: program, configuration, data. Ranks that differ would
/// wait for each other's batches until a timeout, or train wrongly. Keys whose values may differ
/// between hosts, such as threads and paths of data, are left out. Every rank calls it.
/// @throws base::UserError on rank 0, QuietExit on the others, naming each difference and both
/// hosts
void check_agreement(const std::string& config_text, const Inputs& inputs);

/// Whether the values of a key may differ between hosts: that of a path, of threads, or of what
/// only rank 0 reads.
bool may_differ(std::string_view key);

}  // namespace syncbn::train
