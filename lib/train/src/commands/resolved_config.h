#pragma once

#include <functional>
#include <string>

#include <syncbn/config/command_line.h>
#include <syncbn/config/value.h>
#include <syncbn/train/config.h>

namespace syncbn::train {

/// A configuration from its files and the command line.
struct ResolvedConfig {
  Config config;
  config::Value origins;  ///< all that is not a default, with the place where it was written
  std::string text;       ///< all keys, in YAML
  std::string name;       ///< of the last file without folder and extension, or of a run's folder
  bool can_be_reread = true;  ///< false: one of its files was a pipe
};

/// Loads the plug-ins that the files of --config and the command line name, before everything that
/// depends on what they register. Leaves other mistakes to resolve_config().
/// @param line read without the plug-ins, so without their keys
/// @throws what the other load_plugins() throws
void load_plugins(const config::CommandLine& line);

/// @throws base::UserError with all mistakes, including those in `faults`
ResolvedConfig resolve_config(const config::CommandLine& line, config::Faults& faults);

/// Calls `work`. If the message of its mistake begins with a key of the configuration
/// ("data.train: …"), prepends the place where the key was written; for `data` as a whole, the
/// option that gave the file that the message names, if there is one.
void with_place(const ResolvedConfig& config, const std::function<void()>& work);

}  // namespace syncbn::train
