#include "changed_settings.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/config/yaml.h>

#include <algorithm>
#include <array>
#include <string_view>

namespace syncbn::train {
namespace {

/// Keys that say where and for how long a run goes on, not what it computes.
constexpr std::array<std::string_view, 13> kKeysThatMayChange = {
    "run_dir",         "resume",
    "overwrite",       "epochs",
    "threads",         "timeout",
    "connect_timeout", "backend",
    "log_interval",    "loader.num_workers",
    "loader.prefetch", "loader.pin_memory",
    "loader.timeout"};

}  // namespace

std::vector<std::string> changed_settings(const NamedConfig& checkpoint, const NamedConfig& now) {
  std::vector<std::string> changed;
  for (const auto& [key, before, after] :
       config::changes(config::parse_yaml(checkpoint.text, checkpoint.name),
                       config::parse_yaml(now.text, now.name))) {
    if (key == "optimizer.type") {
      throw base::UserError(fmt::format(
          "it was made with optimizer.type {} and this configuration has {}, which cannot use "
          "the former's state; set it back, or begin a new run without --resume",
          before, after));
    }
    if (std::ranges::find(kKeysThatMayChange, key) != kKeysThatMayChange.end()) continue;
    changed.push_back(fmt::format("{} {} (was {})", key, after, before));
  }
  return changed;
}

}  // namespace syncbn::train
