#pragma once

#include <optional>
#include <string>
#include <vector>

#include <syncbn/config/command_line.h>

namespace syncbn::train {

/// The name of training in tables of commands. It is not written on the command line.
constexpr const char* kTraining = "train";

/// Reads the arguments of a command, without its name: program options and keys, also as PyTorch's
/// ImageNet example spells them.
/// @param command "eval", or kTraining
/// @param args the first may be a run's folder or a YAML file, for --config, or a checkpoint in a
///   run's folder, for --config and --resume
/// @param faults also gets options that are for other commands
config::CommandLine parse_arguments(const std::string& command,
                                    const std::vector<std::string>& args, config::Faults& faults);

/// Whether --color asks for colours; nothing without it, or with `auto`.
std::optional<bool> colours_of(const config::CommandLine& line);

/// The output of `train --print_help_texts` (apps/train/help_texts.h): the texts that need neither
/// a configuration nor a plug-in.
std::string help_texts();

/// The text of `train COMMAND --help`, `train --help` or `train --help TOPIC`.
/// @param args the whole command line
/// @param topic as of config::help_topic()
/// @throws base::UserError when there is no such key or section
std::string help_of(const std::vector<std::string>& args, const std::string& topic);

/// "; did you mean 'watch'?" for a word that is almost a command; otherwise "".
std::string did_you_mean_command(const std::string& word);

}  // namespace syncbn::train
