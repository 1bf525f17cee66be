#include "resolved_config.h"

#include <syncbn/config/layers.h>
#include <syncbn/config/yaml.h>
#include <syncbn/train/command.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include "run_folder.h"

namespace syncbn::train {

namespace {

namespace fs = std::filesystem;

/// The file without its extension, or the folder of a run whose config.yaml it is.
std::string name_of(const fs::path& file) {
  const fs::path folder = fs::absolute(file).lexically_normal().parent_path();
  const bool is_of_run = file.filename() == RunFolder::kConfig && RunFolder::is_run(folder);
  return is_of_run ? folder.filename().string() : file.stem().string();
}

/// The files of --config; of a folder, the config.yaml in it.
std::vector<std::string> files_of(const config::CommandLine& line) {
  std::vector<std::string> files = line.values("config");
  for (std::string& file : files) {
    std::error_code ignored;
    if (fs::is_directory(file, ignored)) file = fs::path(file) / RunFolder::kConfig;
  }
  return files;
}

}  // namespace

ResolvedConfig resolve_config(const config::CommandLine& line, config::Faults& faults) {
  const std::vector<std::string> files = files_of(line);
  if (files.empty() || std::ranges::count(files, "") > 0) {
    faults.throw_if_any();  // such as a --config without a value
    faults.add({}, files.empty()
                       ? "no configuration is given; name one with --config FILE (see --help)"
                       : "--config names no file; give it one: --config FILE (see --help)");
    faults.throw_if_any();
  }
  ResolvedConfig resolved;
  resolved.name = name_of(files.back());
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
