#pragma once

#include <filesystem>
#include <string>

#include <syncbn/train/config.h>
#include <syncbn/train/inputs.h>

namespace syncbn::train {

/// `train eval`: evaluates a checkpoint on `inputs.eval_set`, on all ranks of the default process
/// group. Rank 0 logs the results, and prints them as a line of JSON. The checkpoint is the one
/// that `resume` names, or best.pt of the newest run.
/// @param tables the folder for the task's tables; empty: none are written
/// @return the exit code 0
/// @throws base::UserError on rank 0, QuietExit on the others, when the checkpoint is missing,
///   damaged or of another network, or `tables` cannot be written.
int evaluate_checkpoint(const Config& config, const std::string& name, const Inputs& inputs,
                        const std::filesystem::path& tables);

}  // namespace syncbn::train
