#pragma once

#include <filesystem>
#include <string>

#include <syncbn/train/config.h>
#include <syncbn/train/inputs.h>

namespace syncbn::train {

/// The file that a command without training is about: `resume`, or best.pt or last.pt of the newest
/// run of this name.
/// @param command for messages
/// @throws base::UserError if there is none
std::filesystem::path checkpoint_file(const std::string& command, const Config& config,
                                      const std::string& name);

/// `train eval`: evaluates a checkpoint on `inputs.eval_set`, on all ranks of the default process
/// group. Rank 0 logs the results, and prints them as a line of JSON. The checkpoint is the one
/// that `resume` names, or best.pt of the newest run.
/// @return the exit code 0
/// @throws base::UserError on rank 0, QuietExit on the others, when the checkpoint is missing,
///   damaged or of another network.
int evaluate_checkpoint(const Config& config, const std::string& name, const Inputs& inputs);

}  // namespace syncbn::train
