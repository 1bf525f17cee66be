#include "resolved_config.h"

#include <syncbn/config/layers.h>
#include <syncbn/config/yaml.h>
#include <syncbn/train/command.h>

#include <algorithm>
#include <filesystem>
#include <vector>

namespace syncbn::train {

ResolvedConfig resolve_config(const config::CommandLine& line, config::Faults& faults) {
  const std::vector<std::string> files = line.values("config");
  if (files.empty() || std::ranges::count(files, "") > 0) {
    faults.throw_if_any();  // such as a --config without a value
    faults.add({}, files.empty()
                       ? "no configuration is given; name one with --config FILE (see --help)"
                       : "--config names no file; give it one: --config FILE (see --help)");
    faults.throw_if_any();
  }
  ResolvedConfig resolved;
  resolved.name = std::filesystem::path(files.back()).stem().string();
  resolved.origins = config::load_files({files.begin(), files.end()}, faults);
  config::merge(line.overrides, resolved.origins, faults);
  config::resolve_references(resolved.origins, config_fields(), faults);
  config::Schema<Config>::get().read(resolved.origins, resolved.config, "", faults);
  faults.throw_if_any();
  config::Value all = config::Schema<Config>::get().write(resolved.config);
  config::escape_references(all);
  resolved.text = config::to_yaml(all);
  return resolved;
}

}  // namespace syncbn::train
