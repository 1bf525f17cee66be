#pragma once

#include <string>
#include <vector>

#include <syncbn/config/command_line.h>

namespace syncbn::train {

/// `train sweep`: a run for each combination of values, one after the other, each in a process of
/// its own. Runs that have finished are skipped, others resumed. Ends with a table on stdout, and
/// sweep.csv in the sweep's folder.
/// @param args after the word `sweep`
/// @param options of the program
/// @return 0, the code of the first run that failed, or that of the run that a signal stopped
/// @throws base::UserError before the first run, for a mistake in any run's configuration
int sweep(const std::vector<std::string>& args, const std::vector<config::ProgramOption>& options);

}  // namespace syncbn::train
