#pragma once

#include <string>
#include <vector>

#include <syncbn/config/command_line.h>

namespace syncbn::train {

/// `train export`: writes the network of a checkpoint to a file for other programs. One process
/// does it; no run's folder changes.
/// @param args of `train`, after the word `export`
/// @param options of `train`
/// @return the exit code
int export_checkpoint(const std::vector<std::string>& args,
                      const std::vector<config::ProgramOption>& options);

}  // namespace syncbn::train
