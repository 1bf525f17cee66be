#pragma once

#include <functional>
#include <string>
#include <vector>

#include <syncbn/config/schema.h>

namespace syncbn::train {

/// Adds networks, data sets, and so on to their registries (docs/extending.md).
using RegisterAll = std::function<void()>;

/// The main() of a trainer with networks, data sets, and so on of its own, which takes the command
/// line of `train`:
///
///     int main(int argc, char** argv) {
///       return syncbn::train::run_main(argc, argv, register_mine);
///     }
///
/// @param register_all called before the configuration is read
/// @return the program's exit code, after it has reported errors on stderr
int run_main(int argc, char** argv, const RegisterAll& register_all = {});

/// The program `train`: reads the command line and the configuration, then trains.
///
/// Local rank 0 of each node reports mistakes in these, in the environment and in the data, before
/// the process group is formed. The other local ranks find the same mistakes and exit quietly;
/// those in their own environment they report 10 s later.
///
/// @param register_all as for run_main()
/// @return the program's exit code: 0, or 128 + N after signal N
/// @throws base::Error for every other failure
int run_command(const std::vector<std::string>& given, const RegisterAll& register_all = {});

std::vector<config::FieldInfo> config_fields();

/// The content of docs/train.schema.json.
std::string config_json_schema();

/// The content of docs/config.md.
std::string config_reference();

}  // namespace syncbn::train
