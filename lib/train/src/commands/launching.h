#pragma once

#include <string>
#include <vector>

namespace syncbn::train {

/// Whether -e or --evaluate of the ImageNet example is among `args`.
bool is_evaluation(const std::vector<std::string>& args);

/// A part of a command line: words as they were typed, or what replaces an option of the ImageNet
/// example or its folder of data.
struct TranslatedWords {
  std::vector<std::string> words;       ///< at least one: "--optimizer.lr=0.1"
  std::vector<std::string> typed = {};  ///< {"--lr", "0.1"}, {"lr=0.1"}; empty: as in `words`
};

/// Replaces the options of PyTorch's ImageNet example (examples/imagenet/main.py) by this program's
/// and the launcher's: `-a resnet50 -b 256 DIR`. docs/imagenet.md has the list.
/// @throws base::UserError for values without a counterpart, with what to do instead
std::vector<TranslatedWords> translate_imagenet_options(const std::vector<std::string>& args);

/// The options of the ImageNet example, with underscores, for advice on a misspelt one.
std::vector<std::string> imagenet_names();

/// The replacement of an option by translate_imagenet_options(), such as "--optimizer.lr=VALUE" for
/// "lr"; "" for other names.
/// @param name without dashes, with underscores
std::string imagenet_counterpart(const std::string& name);

/// Whether `train` passes the option on to syncbn-launch.
bool is_launcher_option(const std::string& name);

/// A command line of train that may start its own ranks.
struct LaunchRequest {
  std::vector<std::string> launcher;  ///< options of syncbn-launch: "--nnodes=2"
  std::vector<std::string> program;   ///< all others
  std::vector<std::string> typed;     ///< `program` with the options of the example as typed
  bool asks = false;                  ///< --nproc_per_node is there
};

/// @param args options of the ImageNet example are translated first
/// @throws base::UserError for an option of the launcher without its value
LaunchRequest split_launch_options(const std::vector<std::string>& args);

/// If --nproc_per_node is among `args`, executes syncbn-launch with the launcher's options among
/// `args`; syncbn-launch starts this program with the others on each rank. Returns otherwise.
/// @throws base::UserError if syncbn-launch cannot be found or executed, and for the launcher's
///   options without --nproc_per_node
void launch_if_asked(const std::vector<std::string>& args);

}  // namespace syncbn::train
