#pragma once

#include <string>
#include <vector>

#include <syncbn/config/schema.h>

namespace syncbn::train {

/// The program `train`: reads the command line and the configuration, then trains.
///
/// Mistakes in these, in the environment and in the data are reported once per node, by local rank
/// 0, before the process group is formed. The other local ranks find the same mistakes and exit
/// quietly. A mistake that only one of them may have, in its environment, it reports 10 s later.
///
/// @return the program's exit code: 0, or 128 + N after signal N
/// @throws base::Error for every other failure
int run_command(const std::vector<std::string>& args);

/// All keys of a configuration.
std::vector<config::FieldInfo> config_fields();

/// The content of docs/config.md.
std::string config_reference();

}  // namespace syncbn::train
