#pragma once

#include <string>
#include <vector>

#include <syncbn/config/schema.h>

namespace syncbn::train {

/// The program `train`: reads the command line and the configuration, then trains.
///
/// Local rank 0 of each node reports mistakes in these, in the environment and in the data, before
/// the process group is formed. The other local ranks find the same mistakes and exit quietly;
/// those in their own environment they report 10 s later.
///
/// @return the program's exit code: 0, or 128 + N after signal N
/// @throws base::Error for every other failure
int run_command(const std::vector<std::string>& given);

std::vector<config::FieldInfo> config_fields();

/// The content of docs/train.schema.json.
std::string config_json_schema();

/// The content of docs/config.md.
std::string config_reference();

}  // namespace syncbn::train
