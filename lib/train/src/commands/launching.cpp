#include "commands/launching.h"

#include <fmt/format.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/base/program_file.h>
#include <syncbn/base/shell.h>
#include <syncbn/base/text.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string_view>

namespace syncbn::train {
namespace {

namespace fs = std::filesystem;
using Words = std::vector<std::string>;

/// An option in `args`.
struct Option {
  std::string name;                       ///< without dashes, with underscores: "dist_url"
  std::optional<std::string> value = {};  ///< after '=', or the next word
  size_t words = 1;                       ///< number of words that it takes
};

Option option_at(const Words& args, size_t place, bool takes_value) {
  const std::string& word = args[place];
  const size_t equals = word.find('=');
  Option option{.name = word.substr(0, equals)};
  option.name.erase(0, std::min(option.name.find_first_not_of('-'), option.name.size()));
  std::ranges::replace(option.name, '-', '_');
  if (equals != std::string::npos) {
    option.value = word.substr(equals + 1);
  } else if (takes_value && place + 1 < args.size()) {
    option.value = args[place + 1];
    option.words = 2;
  }
  return option;
}

// ---- the ImageNet example -----------------------------------------------------------------------

using Translation = std::function<Words(const std::string& value)>;

Translation key(const std::string& name) {
  return [name](const std::string& value) { return Words{fmt::format("--{}={}", name, value)}; };
}

Translation refused(const std::string& option, const std::string& advice) {
  return [=](const std::string&) -> Words {
    throw base::UserError(fmt::format("{}: {} (docs/imagenet.md)", option, advice));
  };
}

Words translate_url(const std::string& url) {
  constexpr std::string_view kTcp = "tcp://";
  if (url == "env://") return {};
  const size_t colon = url.rfind(':');
  if (!url.starts_with(kTcp) || colon < kTcp.size()) {
    throw base::UserError(
        fmt::format("--dist-url: expected tcp://HOST:PORT or env://, got '{}'", url));
  }
  return {fmt::format("--master_addr={}", url.substr(kTcp.size(), colon - kTcp.size())),
          fmt::format("--master_port={}", url.substr(colon + 1))};
}

/// The example's options that take a value, by their names with underscores. Names that are keys of
/// `train` itself (--epochs, --seed, --resume, --batch-size) are not here.
const std::map<std::string, Translation>& imagenet_values() {
  static const std::map<std::string, Translation> all = {
      {"a", key("model")},
      {"arch", key("model")},
      {"j", key("loader.num_workers")},
      {"workers", key("loader.num_workers")},
      {"b",
       [](const std::string& samples) {  // the file may set batch_size
         return Words{"--batch_size=null", "--global_batch_size=" + samples};
       }},
      {"lr", key("optimizer.lr")},
      {"learning_rate", key("optimizer.lr")},
      {"momentum", key("optimizer.momentum")},
      {"wd", key("optimizer.weight_decay")},
      {"weight_decay", key("optimizer.weight_decay")},
      {"p", key("log_interval")},
      {"print_freq", key("log_interval")},
      {"dist_backend", key("backend")},
      {"world_size", key("nnodes")},
      {"rank", key("node_rank")},
      {"dist_url", translate_url},
      {"gpu", [](const std::string& gpu) { return Words{"--device=cuda:" + gpu}; }},
  };
  return all;
}

const std::map<std::string, Translation>& imagenet_switches() {
  static const std::map<std::string, Translation> all = {
      {"multiprocessing_distributed",
       [](const std::string&) { return Words{"--nproc_per_node=auto"}; }},
      {"dummy", [](const std::string&) { return Words{"--data.type=synthetic"}; }},
      {"e", refused("--evaluate", "use train eval --split val --resume FILE")},
      {"evaluate", refused("--evaluate", "use train eval --split val --resume FILE")},
      {"pretrained", refused("--pretrained", "name a file of weights with --init FILE")},
      {"no_accel", [](const std::string&) { return Words{"--device=cpu"}; }},
  };
  return all;
}

/// Whether a word may be the value of the option before it.
bool may_be_value(const Words& args, size_t place) {
  return place > 0 && args[place - 1].starts_with("--") &&
         args[place - 1].find('=') == std::string::npos &&
         !imagenet_switches().contains(option_at(args, place - 1, false).name);
}

/// Whether a word is a folder of images, the example's only argument.
bool is_data_folder(const Words& args, size_t place) {
  const std::string& word = args[place];
  if (word.starts_with('-') || word.find('=') != std::string::npos) return false;
  // Commands of train and the argument of predict, even if folders of these names hold data.
  if (place == 0 && (word == "eval" || word == "predict")) return false;
  if (place == 1 && args.front() == "predict") return false;
  std::error_code ignored;
  return !may_be_value(args, place) && fs::is_directory(fs::path(word) / "train", ignored);
}

// ---- the launcher -------------------------------------------------------------------------------

constexpr std::string_view kTrigger = "nproc_per_node";

// The launcher's options that `train` passes on. For others, users start syncbn-launch.
constexpr std::string_view kLauncherOptions[] = {
    kTrigger,       "nnodes",  "node_rank", "master_addr",  "master_port", "rdzv_endpoint",
    "rdzv_backend", "rdzv_id", "log_dir",   "max_restarts", "bind"};
constexpr std::string_view kLauncherSwitches[] = {"standalone", "oversubscribe"};

}  // namespace

Words translate_imagenet_options(const Words& args) {
  Words all;
  bool has_world_size = false;
  for (size_t i = 0; i < args.size();) {
    if (is_data_folder(args, i)) {
      all.push_back("--data.type=image_folder");
      all.push_back("--data.train=" + args[i] + "/train");
      all.push_back("--data.val=" + args[i] + "/val");
      ++i;
      continue;
    }
    const bool is_option = args[i].starts_with('-') && args[i].size() > 1;
    // `lr=0.1` means `--lr=0.1`, as for keys.
    const bool is_setting =
        !is_option && args[i].find('=') != std::string::npos && !may_be_value(args, i);
    const std::string name = option_at(args, i, false).name;
    const auto value = imagenet_values().find(name);
    const auto toggle = imagenet_switches().find(name);
    Words words = {args[i]};
    size_t taken = 1;
    if ((is_option || is_setting) && value != imagenet_values().end()) {
      const Option option = option_at(args, i, true);
      if (!option.value) {
        throw base::UserError(fmt::format("the option '{}' needs a value", args[i]));
      }
      words = value->second(*option.value);
      has_world_size = has_world_size || name == "world_size";
      taken = option.words;
    } else if (is_option && toggle != imagenet_switches().end()) {
      words = toggle->second("");
    }
    all.insert(all.end(), words.begin(), words.end());
    i += taken;
  }
  const auto chooses_ranks = [](const std::string& word) {
    return word.starts_with("--nproc_per_node") || word.starts_with("--nproc-per-node");
  };
  // Without --multiprocessing-distributed the example's world size counts processes.
  if (has_world_size && std::ranges::none_of(all, chooses_ranks)) {
    all.push_back("--nproc_per_node=1");
  }
  return all;
}

std::string imagenet_counterpart(const std::string& name) {
  Words words;
  if (const auto value = imagenet_values().find(name); value != imagenet_values().end()) {
    words = value->second(name == "dist_url" ? "tcp://HOST:PORT" : "VALUE");
  } else if (const auto toggle = imagenet_switches().find(name);
             toggle != imagenet_switches().end()) {
    words = toggle->second("");
  }
  return base::join(words, " ");
}

bool is_launcher_option(const std::string& name) {
  return std::ranges::count(kLauncherOptions, name) > 0 ||
         std::ranges::count(kLauncherSwitches, name) > 0;
}

LaunchRequest split_launch_options(const Words& given) {
  const Words args = translate_imagenet_options(given);
  LaunchRequest parts;
  for (size_t i = 0; i < args.size();) {
    const bool is_option = args[i].starts_with("--");
    const std::string name = option_at(args, i, false).name;
    const bool takes = is_option && std::ranges::count(kLauncherOptions, name) > 0;
    if (is_option && is_launcher_option(name)) {
      const Option option = option_at(args, i, takes);
      if (takes && (!option.value || (option.words == 2 && option.value->starts_with("--")))) {
        throw base::UserError(fmt::format("the option '{}' needs a value", args[i]));
      }
      parts.launcher.push_back("--" + option.name + (option.value ? "=" + *option.value : ""));
      parts.asks = parts.asks || name == kTrigger;
      i += option.words;
    } else {
      parts.program.push_back(args[i++]);
    }
  }
  return parts;
}

void launch_if_asked(const Words& args) {
  const LaunchRequest parts = split_launch_options(args);
  if (!parts.asks && !parts.launcher.empty()) {
    const std::string& first = parts.launcher.front();
    throw base::UserError(
        fmt::format("{} is for the launcher: give --nproc_per_node=N as well, or start this "
                    "program with syncbn-launch",
                    first.substr(0, first.find('='))));
  }
  if (!parts.asks) return;
  const fs::path program = base::program_file();
  const fs::path beside = program.parent_path() / "syncbn-launch";
  Words words = {base::exists(beside) ? beside.string() : "syncbn-launch"};
  words.insert(words.end(), parts.launcher.begin(), parts.launcher.end());
  // The result of eval is a line of JSON.
  if (!parts.program.empty() && parts.program.front() == "eval") words.emplace_back("--prefix=off");
  words.push_back(program.string());
  words.insert(words.end(), parts.program.begin(), parts.program.end());
  const std::vector<char*> argv = base::argv_of(words);
  ::execvp(argv[0], argv.data());
  throw base::UserError(
      fmt::format("--nproc_per_node: cannot execute {}: {}; install it beside {} or put it on PATH",
                  words.front(), std::strerror(errno), program.string()));
}

}  // namespace syncbn::train
