#include "common/agreement.h"

#include <fmt/format.h>
#include <syncbn/base/env.h>
#include <syncbn/base/text.h>
#include <syncbn/config/yaml.h>
#include <syncbn/dist/collectives.h>
#include <syncbn/dist/process_group.h>
#include <torch/version.h>

#include <algorithm>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "common/config_keys.h"
#include "common/plugins.h"
#include "common/rank_0.h"
#include "common/revision.h"

namespace syncbn::train {
namespace {

constexpr size_t kMaxShown = 10;

config::Value description(const std::string& config_text, const Inputs& inputs) {
  config::Value all = config::parse_yaml(config_text, "config");
  const auto set = [&](const char* key, std::string text) {
    all.set(key, config::Value::of_scalar(std::move(text), /*quoted=*/true));
  };
  set("host", base::hostname());
  set("build of train", fmt::format("{} {}", SYNCBN_VERSION, kRevision));
  set("version of libtorch", TORCH_VERSION);
  std::vector<std::string> plugins;
  for (const Plugin& plugin : loaded_plugins()) {
    plugins.push_back(fmt::format("{} {:.12}", plugin.file, plugin.sha256));
  }
  set("plug-ins", plugins.empty() ? "none" : base::join(plugins, ", "));
  set("training data", fmt::format("{:016x}", inputs.train_set->fingerprint()));
  set("evaluation data", fmt::format("{:016x}", inputs.eval_set->fingerprint()));
  return all;
}

/// The description without the keys that may differ.
std::string shared_part(const config::Value& all, const std::string& path = "") {
  std::string out;
  for (const config::Value::Member& member : all.members) {
    const std::string key = path.empty() ? member.key : path + "." + member.key;
    if (may_differ(key) || key == "host") continue;
    out += member.value.kind == config::Value::Kind::kMap
               ? shared_part(member.value, key)
               : fmt::format("{}={}", key, config::to_yaml(member.value));
  }
  return out;
}

/// "learning rate 0.1 on rank 0 (a), 0.2 on rank 3 (b)": each difference, with the first rank that
/// has it. One line: launchers of other nodes show only the first line of an error.
std::string differences(const std::vector<std::string>& of_ranks) {
  const config::Value first = config::parse_yaml(of_ranks.front(), "rank 0");
  std::map<std::string, std::string> lines;
  for (size_t rank = 1; rank < of_ranks.size(); ++rank) {
    const config::Value other = config::parse_yaml(of_ranks[rank], "rank");
    for (const auto& [key, here, there] : config::changes(first, other)) {
      if (may_differ(key) || key == "host") continue;
      lines.emplace(
          key, fmt::format("{}: {} on rank 0 ({}), {} on rank {} ({})", key, here,
                           first.find("host")->scalar, there, rank, other.find("host")->scalar));
    }
  }
  std::vector<std::string> all;
  for (const auto& [key, line] : lines) all.push_back(line);
  return base::join_some(all, "; ", kMaxShown);
}

}  // namespace

void check_agreement(const std::string& config_text, const Inputs& inputs) {
  const config::Value all = description(config_text, inputs);
  const size_t hash = std::hash<std::string>()(shared_part(all));
  const std::vector<std::string> hashes = dist::all_gather_bytes(std::to_string(hash));
  if (std::ranges::count(hashes, hashes.front()) == std::ssize(hashes)) return;
  const std::vector<std::string> of_ranks = dist::gather_bytes(config::to_yaml(all), 0);
  do_on_rank_0([&] {
    throw base::UserError(
        "the ranks were not started alike; start all with the same command and "
        "the same files: " +
        differences(of_ranks));
  });
}

}  // namespace syncbn::train
