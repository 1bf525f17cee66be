#include <syncbn/train/command.h>

#include <ATen/Parallel.h>
#include <fmt/core.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/heap.h>
#include <syncbn/base/log.h>
#include <syncbn/base/threads.h>
#include <syncbn/config/command_line.h>
#include <syncbn/config/reference.h>
#include <syncbn/config/yaml.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/train/config.h>
#include <syncbn/train/trainer.h>

#include <chrono>
#include <filesystem>
#include <limits>
#include <optional>
#include <thread>

#include "out_of_memory.h"

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

std::optional<int> int_from_environment(const char* name, int64_t min) {
  const auto value = base::env_int(name, min, std::numeric_limits<int>::max());
  return value ? std::optional(static_cast<int>(*value)) : std::nullopt;
}

Place place_from_environment(int local_rank) {
  const auto rank = int_from_environment("RANK", 0);
  const auto world_size = int_from_environment("WORLD_SIZE", 1);
  if (rank.has_value() != world_size.has_value()) {
    throw base::UserError(fmt::format(
        "the environment sets {} and not {}; start the program with syncbn-launch, which sets "
        "both, "
        "or unset it to train with one rank",
        rank ? fmt::format("RANK={}", *rank) : fmt::format("WORLD_SIZE={}", *world_size),
        rank ? "WORLD_SIZE" : "RANK"));
  }
  const Place place{rank.value_or(0), world_size.value_or(1), local_rank};
  if (place.rank >= place.world_size) {
    throw base::UserError(
        fmt::format("RANK={} is not below WORLD_SIZE={}", place.rank, place.world_size));
  }
  return place;
}

/// Does work of before the ranks are connected. A mistake that all ranks share is said by local
/// rank 0. The others cannot know whether theirs is one: they leave local rank 0 the time to speak,
/// at which a launcher ends them, and speak afterwards.
template <class Work>
auto local_rank_0_first(int local_rank, const Work& work) {
  try {
    return work();
  } catch (const base::UserError&) {
    if (local_rank != 0) std::this_thread::sleep_for(kSilentRanksWait);
    throw;
  }
}

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

/// The default process group, for as long as it lives.
class DefaultGroup {
 public:
  explicit DefaultGroup(const Config& config) {
    dist::init_process_group({.backend = config.backend,
                              .timeout = milliseconds(config.timeout),
                              .connect_timeout = milliseconds(config.connect_timeout)});
  }
  ~DefaultGroup() { dist::destroy_process_group(); }
  DefaultGroup(const DefaultGroup&) = delete;
  DefaultGroup& operator=(const DefaultGroup&) = delete;
};

/// A configuration that has been read, and what it was read from.
struct Resolved {
  Config config;
  std::string text;
  std::string name;
};

Resolved resolve(const config::CommandLine& line, config::Faults& faults) {
  const auto path = line.value("config");
  if (!path || path->empty()) {
    faults.add({}, path ? "--config names no file; give it one: --config FILE (see --help)"
                        : "no configuration is given; name one with --config FILE (see --help)");
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
    // Of the store, Gloo, the watch and shared memory; the loaders of two sets.
    constexpr int kOfGroup = 8;
    const int threads = at::get_num_threads();
    const int64_t workers = resolved.config.loader.num_workers.value.value_or(threads);
    base::check_threads(threads + kOfGroup + 2 * static_cast<int>(workers));
    inputs = explain_out_of_memory(MemoryFor::kMaking, [&] {
      return load_inputs(resolved.config, place.rank, place.world_size);
    });
  } catch (const base::UserError& error) {
    if (place.local_rank == 0) throw;
    throw LeaveSilently{error.exit_code()};
  }
  // A signal still ends the process: until the group stands nobody could look at one.
  const auto group =
      local_rank_0_first(place.local_rank, [&] { return DefaultGroup(resolved.config); });
  return train(resolved.config, resolved.text, resolved.name, inputs);
}

}  // namespace

int run_command(const std::vector<std::string>& args) {
  base::keep_freed_memory();
  const int local_rank = int_from_environment("LOCAL_RANK", 0).value_or(0);
  const Place place = local_rank_0_first(local_rank, [&] {
    const Place found = place_from_environment(local_rank);
    base::init_logging(found.rank);
    return found;
  });
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
