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
#include <map>
#include <optional>
#include <regex>
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
  // A number, or the name of a network with one, may be joined to a letter, as in argparse: -b2,
  // -aresnet18. Other words are more likely misspelt names.
  static const std::regex kJoined(R"re(-(a[^=]*\d[^=]*|[bejp]\d+))re");
  if (std::regex_match(word, kJoined)) return {.name = word.substr(1, 1), .value = word.substr(2)};
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

constexpr std::string_view kTrigger = "nproc_per_node";
constexpr const char* kAllRanks = "multiprocessing_distributed";

/// The example's options, by their names with underscores, and what replaces them. The value of an
/// option is appended to a replacement that ends in = or :. Names that are keys of `train` itself
/// (--epochs, --seed, --resume, --batch-size) are not here.
const std::map<std::string, std::string>& imagenet_options() {
  static const std::map<std::string, std::string> all = {
      {"a", "--model="},
      {"arch", "--model="},
      {"j", "--loader.num_workers="},
      {"workers", "--loader.num_workers="},
      {"b", "--batch_size="},
      {"lr", "--optimizer.lr="},
      {"learning_rate", "--optimizer.lr="},
      {"momentum", "--optimizer.momentum="},
      {"wd", "--optimizer.weight_decay="},
      {"weight_decay", "--optimizer.weight_decay="},
      {"p", "--log_interval="},
      {"print_freq", "--log_interval="},
      {"dist_backend", "--backend="},
      {"world_size", "--nnodes="},
      {"rank", "--node_rank="},
      {"dist_url", "--dist_url="},  // see translate_url()
      {"gpu", "--device=cuda:"},
      {"pretrained", "--init="},
      {kAllRanks, "--nproc_per_node=auto"},
      {"dummy", "--data.type=synthetic"},
      {"e", "--split=val"},  // of `train eval`; see is_evaluation()
      {"evaluate", "--split=val"},
      {"no_accel", "--device=cpu"},
  };
  return all;
}

bool takes_value(const std::string& name) {
  const auto found = imagenet_options().find(name);
  return found != imagenet_options().end() &&
         (found->second.ends_with('=') || found->second.ends_with(':'));
}

Words translate_url(const std::string& url) {
  constexpr std::string_view kTcp = "tcp://";
  if (url == "env://" || url.starts_with("file://")) return {};
  const size_t colon = url.rfind(':');
  const auto port = base::parse_number<uint16_t>(url.substr(colon + 1));
  if (!url.starts_with(kTcp) || colon <= kTcp.size() || !port) {
    throw base::UserError(
        fmt::format("--dist-url={}: expected tcp://HOST:PORT, with the number of a free port, "
                    "file://PATH or env://",
                    url));
  }
  return {"--master_addr=" + url.substr(kTcp.size(), colon - kTcp.size()),
          fmt::format("--master_port={}", *port)};
}

/// What replaces an option of the example.
Words replacement(const std::string& name, const std::string& value) {
  if (name == "dist_url") return translate_url(value);
  return {imagenet_options().at(name) + (takes_value(name) ? value : "")};
}

bool holds_training_data(const std::string& folder) {
  std::error_code ignored;
  return fs::is_directory(fs::path(folder) / "train", ignored);
}

/// Whether a word may be the value of the option before it.
bool may_be_value(const Words& args, size_t place) {
  if (place == 0 || !args[place - 1].starts_with("--")) return false;
  const Option former = option_at(args, place - 1, false);
  return !former.value && (takes_value(former.name) || !imagenet_options().contains(former.name));
}

/// Whether a word is a folder of images, the example's only argument.
bool is_data_folder(const Words& args, size_t place) {
  const std::string& word = args[place];
  if (word.starts_with('-') || word.find('=') != std::string::npos) return false;
  // Commands of train and the argument of predict, even if folders of these names hold data.
  if (place == 0 && (word == "eval" || word == "predict")) return false;
  if (place == 1 && args.front() == "predict") return false;
  return !may_be_value(args, place) && holds_training_data(word);
}

// ---- the launcher -------------------------------------------------------------------------------

// The launcher's options that `train` passes on. For others, users start syncbn-launch.
constexpr std::string_view kLauncherOptions[] = {
    kTrigger,       "nnodes",  "node_rank", "master_addr",  "master_port", "rdzv_endpoint",
    "rdzv_backend", "rdzv_id", "log_dir",   "max_restarts", "bind"};
constexpr std::string_view kLauncherSwitches[] = {"standalone", "oversubscribe"};

/// Whether the example, or the launcher, would start several processes.
bool is_distributed(const Words& args) {
  for (size_t i = 0; i < args.size(); ++i) {
    const auto [name, value, words] = option_at(args, i, true);
    if (name == "world_size" && base::parse_number<int>(value.value_or("")) > 1) return true;
    if (!args[i].starts_with("--")) continue;
    if (name == kAllRanks || is_launcher_option(name)) return true;
  }
  return false;
}

/// The value of --world-size or --rank; nothing for -1, the example's default.
std::optional<int> meeting_number(const std::string& typed, const std::string& value, int least) {
  const auto number = base::parse_number<int>(value);
  if (number == -1) return std::nullopt;
  if (number >= least) return number;
  throw base::UserError(fmt::format("{}: expected a number of at least {}, got '{}'",
                                    typed.substr(0, typed.find('=')), least, value));
}

}  // namespace

bool is_evaluation(const Words& args) {
  return std::ranges::count(args, "-e") + std::ranges::count(args, "--evaluate") > 0;
}

std::vector<TranslatedWords> translate_imagenet_options(const Words& args) {
  std::vector<TranslatedWords> all;
  std::optional<int> nodes;  // of --world-size
  std::string meeting_file;  // of --dist-url
  bool chooses_ranks = false;
  const bool is_alone = !is_distributed(args);
  const bool is_dummy = std::ranges::count(args, "--dummy") > 0;  // wins over a folder
  for (size_t i = 0; i < args.size();) {
    if (is_data_folder(args, i)) {
      if (is_dummy && ++i) continue;
      all.push_back({.words = {"--data.type=image_folder", "--data.train=" + args[i] + "/train",
                               "--data.val=" + args[i] + "/val"},
                     .typed = {args[i]}});
      ++i;
      continue;
    }
    const bool is_option = args[i].starts_with('-') && args[i].size() > 1;
    // `lr=0.1` means `--lr=0.1`, as for keys.
    const bool is_setting =
        !is_option && args[i].find('=') != std::string::npos && !may_be_value(args, i);
    const std::string name = option_at(args, i, false).name;
    const bool takes = takes_value(name);
    chooses_ranks = chooses_ranks || (is_option && (name == kTrigger || name == kAllRanks));
    if (!(is_option && imagenet_options().contains(name)) && !(is_setting && takes)) {
      if (all.empty() || !all.back().typed.empty()) all.emplace_back();
      all.back().words.push_back(args[i++]);
      continue;
    }
    const Option option = option_at(args, i, takes);
    const std::string value = option.value.value_or("");
    // The example's --pretrained is a switch.
    const bool is_bare =
        name == "pretrained" && (value.starts_with('-') || holds_training_data(value));
    if (takes && (!option.value || is_bare)) {
      throw base::UserError(fmt::format("the option '{}' needs a value{}", args[i],
                                        name == "pretrained" ? ": a file of weights" : ""));
    }
    if (!takes && option.value) {
      throw base::UserError(args[i] + ": this option takes no value; write only the option");
    }
    TranslatedWords part{.words = replacement(name, value), .typed = {args[i]}};
    if (option.words == 2) part.typed.push_back(value);
    if (name == "pretrained" && is_evaluation(args)) part.words = {"--resume=" + value};
    std::optional<int> number;
    if (name == "world_size") number = nodes = meeting_number(args[i], value, 1);
    if (name == "rank") number = meeting_number(args[i], value, 0);
    const bool is_of_meeting = name == "world_size" || name == "rank" || name == "dist_url";
    if (is_of_meeting && (is_alone || (!number && name != "dist_url"))) part.words.clear();
    if (name == "dist_url" && value.starts_with("file://")) meeting_file = value;
    i += option.words;
    if (!part.words.empty()) all.push_back(std::move(part));
  }
  if (!meeting_file.empty() && nodes.value_or(1) > 1) {
    throw base::UserError(fmt::format(
        "--dist-url={}: a file is a meeting point on one node only; give tcp://HOST:PORT of node 0",
        meeting_file));
  }
  // Without --multiprocessing-distributed the example's world size counts processes.
  if (nodes && !chooses_ranks && !is_alone) {
    all.push_back({.words = {"--nproc_per_node=1"}, .typed = {"--world-size"}});
  }
  return all;
}

std::string imagenet_counterpart(const std::string& name) {
  if (name == "dist_url") return "--master_addr=HOST --master_port=PORT";
  if (name == "e" || name == "evaluate") return "train eval --split=val";
  return imagenet_options().contains(name) ? base::join(replacement(name, "VALUE"), " ") : "";
}

std::vector<std::string> imagenet_names() {
  constexpr size_t kMinLetters = 6;  // most words are near a shorter one
  Words names;
  for (const auto& [name, unused] : imagenet_options()) {
    if (name.size() >= kMinLetters) names.push_back(name);
  }
  return names;
}

bool is_launcher_option(const std::string& name) {
  return std::ranges::count(kLauncherOptions, name) > 0 ||
         std::ranges::count(kLauncherSwitches, name) > 0;
}

LaunchRequest split_launch_options(const Words& given) {
  LaunchRequest parts;
  for (const TranslatedWords& part : translate_imagenet_options(given)) {
    const Words& args = part.words;
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
        // Without dashes ("lr=0.1", the folder) a word would be read as the value of the option
        // before it, once the launcher's words between them are gone: pass its translation.
        const bool has_dashes = !part.typed.empty() && part.typed.front().starts_with('-');
        const Words own = has_dashes ? part.typed : Words{args[i]};
        parts.typed.insert(parts.typed.end(), own.begin(), own.end());
        parts.program.push_back(args[i++]);
      }
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
  if (!parts.typed.empty() && parts.typed.front() == "eval") words.emplace_back("--prefix=off");
  words.push_back(program.string());
  words.insert(words.end(), parts.typed.begin(), parts.typed.end());
  const std::vector<char*> argv = base::argv_of(words);
  ::execvp(argv[0], argv.data());
  throw base::UserError(
      fmt::format("--nproc_per_node: cannot execute {}: {}; install it beside {} or put it on PATH",
                  words.front(), std::strerror(errno), program.string()));
}

}  // namespace syncbn::train
