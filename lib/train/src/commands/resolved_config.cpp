#include "commands/resolved_config.h"

#include <fmt/format.h>
#include <syncbn/base/error.h>
#include <syncbn/base/open_file.h>
#include <syncbn/base/shell.h>
#include <syncbn/base/text.h>
#include <syncbn/config/layers.h>
#include <syncbn/config/yaml.h>
#include <syncbn/train/command.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <string>
#include <system_error>
#include <vector>

#include "common/config_keys.h"
#include "common/plugins.h"
#include "records/run_files.h"

namespace syncbn::train {

namespace {

namespace fs = std::filesystem;

/// The texts of configuration files since the last load_plugins(). Each is read once: a pipe, such
/// as a shell's <(…), can be read only once, and a file may change meanwhile.
std::map<fs::path, std::string>& texts() {
  static std::map<fs::path, std::string> all;
  return all;
}

const std::string& text_of(const fs::path& file) {
  const auto known = texts().find(file);
  if (known != texts().end()) return known->second;
  std::string text = config::read_yaml(file);
  if (const std::string what = base::foreign_file(text); !what.empty()) {
    throw base::UserError(fmt::format("cannot read {}: {}", file.string(), what));
  }
  return texts().emplace(file, std::move(text)).first->second;
}

config::Value load(const std::vector<fs::path>& files, config::Faults& faults) {
  return config::load_files(files, faults, [](const fs::path& file) {
    return config::parse_yaml(text_of(file), file.string());
  });
}

/// The folder of the run whose config.yaml this is, or "".
fs::path run_folder_of(const fs::path& file) {
  const fs::path folder = fs::absolute(file).lexically_normal().parent_path();
  return file.filename() == run_files::kConfig && run_files::is_run(folder) ? folder : "";
}

/// The name of a run: that of its file without the extension, or of the folder of the run whose
/// config.yaml it is.
std::string name_of(const fs::path& file) {
  const fs::path run = run_folder_of(file);
  return run.empty() ? file.stem().string() : run.filename().string();
}

/// The files of --config; of a folder, the config.yaml in it.
std::vector<std::string> files_of(const config::CommandLine& line) {
  std::vector<std::string> files;
  if (line.has("config")) files = line.program.at("config");
  for (std::string& file : files) {
    std::error_code ignored;
    if (fs::is_directory(file, ignored)) file = fs::path(file) / run_files::kConfig;
  }
  return files;
}

/// Says what a file that cannot be a configuration may be instead.
void check_file(const fs::path& file) {
  std::error_code ignored;
  if (base::is_missing(file) && base::dangling_link(file).empty()) {  // reading it names the link
    std::map<std::string, std::string> others;  // by stem: ".yaml" is not what was mistyped
    const fs::path folder = file.has_parent_path() ? file.parent_path() : ".";
    for (const auto& entry : fs::directory_iterator(folder, ignored)) {
      const fs::path name = entry.path().filename();
      if (name.extension() == ".yaml" || name.extension() == ".yml") others[name.stem()] = name;
    }
    std::vector<std::string> stems;
    for (const auto& other : others) stems.push_back(other.first);
    const auto near = base::nearest(file.stem().string(), stems);
    throw base::UserError(
        fmt::format("cannot read {}: No such file{}", file.string(),
                    near ? fmt::format("; did you mean '{}'?", others.at(*near)) : ""));
  }
  const fs::path extension = file.extension();
  if (extension == ".pt" || extension == ".pth" || extension == ".safetensors") {
    throw base::UserError(fmt::format(
        "--config: {} holds weights; name a YAML file, such as the config.yaml of a run's folder, "
        "and the weights by --resume (to go on with the run) or --init (to begin with them)",
        file.string()));
  }
}

/// The config.yaml of a run. A run writes all keys, and a newline after the last one, which an
/// editor may leave out.
config::Value load_run(const fs::path& file, const fs::path& run, config::Faults& faults) {
  try {
    check_file(file);
    config::Value all = load({file}, faults);
    const bool is_whole = all.find(config::Schema<Config>::get().names().back()) != nullptr;
    if (is_whole || text_of(file).ends_with('\n')) return all;
    throw base::UserError(file.string() + " is cut off");
  } catch (const base::UserError& error) {
    throw base::UserError(fmt::format(
        "{}; the run's own configuration is damaged or missing: give the one that it was started "
        "with, --config FILE --run_dir {}",
        error.what(), base::shell_quoted({run.string()})));
  }
}

}  // namespace

void load_plugins(const config::CommandLine& line) {
  config::Faults ignored;
  config::Value all;
  try {
    const std::vector<std::string> files = files_of(line);
    texts().clear();
    all = load({files.begin(), files.end()}, ignored);
  } catch (const base::UserError&) {
    return;
  }
  config::merge(line.overrides, all, ignored);
  config::resolve_references(all, config_fields(), ignored);
  if (const config::Value* const wanted = all.find("plugins")) load_plugins(*wanted);
}

ResolvedConfig resolve_config(const config::CommandLine& line, config::Faults& faults) {
  const std::vector<std::string> files = files_of(line);
  if (files.empty()) {
    faults.throw_if_any();  // such as a --config without a value
    throw base::UserError(
        "no configuration is given; name a YAML file or a run's folder: --config FILE, runs/NAME "
        "(see --help)");
  }
  ResolvedConfig resolved;
  resolved.name = name_of(files.back());
  for (const std::string& file : files) {
    const fs::path run = run_folder_of(file);
    if (run.empty()) check_file(file);
    const config::Value own = run.empty() ? load({file}, faults) : load_run(file, run, faults);
    config::merge(own, resolved.origins, faults);
    resolved.origins.mark = own.mark;  // where missing keys are reported
  }
  config::merge(line.overrides, resolved.origins, faults);
  // A batch size of the command line replaces the files', whichever of the two keys they set.
  const config::Value* const own = line.overrides.find("batch_size");
  const config::Value* const of_all = line.overrides.find("global_batch_size");
  const bool is_one = (own == nullptr) != (of_all == nullptr);
  if (is_one && (own != nullptr ? own : of_all)->kind != config::Value::Kind::kNull) {
    resolved.origins.set(own != nullptr ? "global_batch_size" : "batch_size", config::Value());
  }
  config::resolve_references(resolved.origins, config_fields(), faults);
  config::Schema<Config>::get().read(resolved.origins, resolved.config, "", faults);
  faults.throw_if_any();
  config::Value all = config::Schema<Config>::get().write(resolved.config);
  config::escape_references(all);
  resolved.text = config::to_yaml(all);
  resolved.can_be_reread = std::ranges::all_of(texts(), [](const auto& read) {
    std::error_code ignored;
    return fs::is_regular_file(read.first, ignored);
  });
  return resolved;
}

void with_place(const ResolvedConfig& config, const std::function<void()>& work) try {
  work();
} catch (const base::UserError& mistake) {
  const std::string message = mistake.what();
  const std::string key = message.substr(0, message.find(':'));
  const config::Value* const place = config.origins.at(key);
  if (place == nullptr) throw;
  // A mistake in a file of the data, at which an option points and not the section.
  const auto typed = std::ranges::find_if(place->members, [&](const config::Value::Member& member) {
    const config::Value& value = member.value;
    return key == "data" && is_path_of_data("data." + member.key) && value.mark.line == 0 &&
           !value.scalar.empty() && message.find("'" + value.scalar) != message.npos;
  });
  config::Faults faults;
  faults.add(typed == place->members.end() ? place->mark : typed->value.mark, message);
  faults.throw_if_any();
}

}  // namespace syncbn::train
