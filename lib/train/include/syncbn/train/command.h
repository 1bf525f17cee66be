#pragma once

#include <functional>
#include <string>
#include <vector>

#include <syncbn/config/schema.h>

namespace syncbn::train {

/// Adds networks, data sets and so on to their registries (docs/extending.md).
using RegisterAll = std::function<void()>;

/// The main() of a trainer with custom networks, data sets and so on. It takes the command line of
/// `train`:
///
///     int main(int argc, char** argv) {
///       return syncbn::train::run_main(argc, argv, register_mine);
///     }
///
/// @param register_all called before the configuration is read
/// @return the exit code; prints errors on stderr
int run_main(int argc, char** argv, const RegisterAll& register_all = {});

/// The program `train`: reads the command line and the configuration, then trains.
///
/// Local rank 0 of each node reports mistakes in these, in the environment and in the data, before
/// the process group is formed. The other local ranks wait 10 s before they report the same
/// mistakes, so that the launcher ends them first. Without a launcher they exit quietly, except
/// after a mistake in their own environment.
///
/// @param register_all as for run_main()
/// @return the command's exit code, such as that of train(), or that of a QuietExit
/// @throws base::Error for every other failure
int run_command(const std::vector<std::string>& given, const RegisterAll& register_all = {});

std::vector<config::FieldInfo> config_fields();

/// The content of docs/train.schema.json.
std::string config_json_schema();

/// The content of docs/config.md.
std::string config_reference();

}  // namespace syncbn::train
