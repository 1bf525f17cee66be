#pragma once

#include <string>
#include <vector>

#include <syncbn/config/schema.h>

namespace syncbn::train {

/// The program `train`: reads the command line and the configuration, then trains.
///
/// What is wrong with them, with the environment and with the data they name is said once for each
/// node: by local rank 0, before any process group exists. The other local ranks find the same and
/// leave in silence; what only one of them may have found in its environment it says a little
/// later.
///
/// @return the program's exit code: 0, or 128 + N after signal N.
/// @throws base::Error for everything else that goes wrong.
int run_command(const std::vector<std::string>& args);

/// All keys of a configuration, for help and reference.
std::vector<config::FieldInfo> config_fields();

/// docs/config.md.
std::string config_reference();

}  // namespace syncbn::train
