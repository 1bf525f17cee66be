#pragma once

#include <string>
#include <vector>

#include <syncbn/config/command_line.h>

namespace syncbn::train {

/// `train watch RUN`: shows a run on the terminal until it ends. Where there is no terminal, prints
/// its state once and then a line for each epoch.
/// @param args after the word `watch`
/// @param options of the program
/// @throws base::UserError when RUN is not the folder of a run.
int watch(const std::vector<std::string>& args, const std::vector<config::ProgramOption>& options);

}  // namespace syncbn::train
