#include <syncbn/train/command.h>

#include <ATen/Parallel.h>
#include <fmt/core.h>
#include <syncbn/base/env.h>
#include <syncbn/base/log.h>
#include <syncbn/config/command_line.h>
#include <syncbn/config/reference.h>
#include <syncbn/config/yaml.h>
#include <syncbn/train/config.h>
#include <syncbn/train/trainer.h>

#include <chrono>
#include <filesystem>
#include <limits>
#include <thread>

namespace syncbn::train {
namespace {

constexpr const char* kUsage =
    "usage: train --config FILE [--KEY VALUE]...\n"
    "       syncbn-launch --standalone --nproc_per_node=4 train --config FILE [--KEY VALUE]...\n\n"
    "Trains the network that a configuration describes. Every key of the configuration can be\n"
    "set on the command line as well: --epochs 3 --optimizer.lr=0.05 --optimizer.type adamw";

// A launcher ends all ranks when the first one leaves: the silent ones give the one that speaks
// the time to do so.
constexpr auto kSilentRanksWait = std::chrono::seconds(10);

const std::vector<config::ProgramOption> kOptions = {
    {"config", "FILE", "the configuration, in YAML"},
    {"print_config", "", "print the configuration with all its defaults, and end"},
    {"print_reference", "", "print all keys as a Markdown document, and end"},
    {"help", "", "print this text, and end"},
    // Old launchers pass it; LOCAL_RANK says the same.
    {"local_rank", "N", ""},
};

/// Who this process is, as far as it is known before a process group exists.
struct Place {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
};

Place place_from_environment() {
  const auto number = [](const char* name, int64_t min, int fallback) {
    const auto value = base::env_int(name, min, std::numeric_limits<int>::max());
    return value ? static_cast<int>(*value) : fallback;
  };
  Place place;
  place.local_rank = number("LOCAL_RANK", 0, 0);
  place.rank = number("RANK", 0, 0);
  place.world_size = number("WORLD_SIZE", 1, 1);
  return place;
}

/// A configuration that has been read, and what it was read from.
struct Resolved {
  Config config;
  std::string text;
  std::string name;
};

Resolved resolve(const config::CommandLine& line, config::Faults& faults) {
  const auto path = line.value("config");
  if (!path) {
    faults.add({}, "no configuration is given; name one with --config FILE (see --help)");
    faults.throw_if_any();
  }
  Resolved resolved;
  resolved.name = std::filesystem::path(*path).stem().string();
  config::Value value = config::load_yaml(*path);
  config::apply_overrides(line.overrides, value);
  config::Schema<Config>::get().read(value, resolved.config, "", faults);
  faults.throw_if_any();
  resolved.text = config::to_yaml(config::Schema<Config>::get().write(resolved.config));
  return resolved;
}

/// Does what asks for no run. Returns whether that was all.
bool print_only(const config::CommandLine& line, const Place& place) {
  std::string text;
  if (line.has("help")) {
    text = config::help_text(kUsage, kOptions, config_fields());
  } else if (line.has("print_reference")) {
    text = config_reference();
  } else {
    return false;
  }
  if (place.local_rank == 0) fmt::print("{}", text);
  return true;
}

int run(const std::vector<std::string>& args, const Place& place) {
  Resolved resolved;
  Inputs inputs;
  try {
    config::Faults faults;
    const auto line = config::parse_command_line(args, kOptions, config_fields(), faults);
    if (print_only(line, place)) return base::kExitOk;
    resolved = resolve(line, faults);
    if (line.has("print_config")) {
      if (place.local_rank == 0) fmt::print("{}", resolved.text);
      return base::kExitOk;
    }
    if (resolved.config.threads > 0) at::set_num_threads(static_cast<int>(resolved.config.threads));
    inputs = load_inputs(resolved.config, place.rank, place.world_size);
  } catch (const base::UserError& error) {
    if (place.local_rank == 0) throw;
    throw LeaveSilently{error.exit_code()};
  }
  return train(resolved.config, resolved.text, resolved.name, inputs);
}

}  // namespace

int run_command(const std::vector<std::string>& args) {
  const Place place = place_from_environment();
  base::init_logging(place.rank);
  try {
    return run(args, place);
  } catch (const LeaveSilently& leave) {
    std::this_thread::sleep_for(kSilentRanksWait);
    return leave.exit_code;
  }
}

std::vector<config::FieldInfo> config_fields() {
  std::vector<config::FieldInfo> fields;
  config::Schema<Config>::get().info("", fields);
  return fields;
}

std::string config_reference() {
  return "# Configuration\n\n"
         "Every key of a configuration file of `train`. On the command line each can be set as "
         "`--KEY VALUE`.\n"
         "This page is made by `train --print-reference`.\n\n" +
         config::markdown_reference(config_fields());
}

}  // namespace syncbn::train
