#include <syncbn/train/command.h>

#include <ATen/Parallel.h>
#include <fmt/core.h>
#include <signal.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/gpus.h>
#include <syncbn/base/heap.h>
#include <syncbn/base/log.h>
#include <syncbn/base/open_file.h>
#include <syncbn/base/text.h>
#include <syncbn/base/threads.h>
#include <syncbn/config/command_line.h>
#include <syncbn/config/json_schema.h>
#include <syncbn/config/reference.h>
#include <syncbn/config/yaml.h>
#include <syncbn/dist/peer_error.h>
#include <syncbn/dist/process_group.h>
#include <syncbn/train/config.h>
#include <syncbn/train/inputs.h>
#include <syncbn/train/report.h>
#include <syncbn/train/trainer.h>
#include <torch/version.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>

#include "commands/commands.h"
#include "commands/launching.h"
#include "commands/program_options.h"
#include "commands/resolved_config.h"
#include "common/agreement.h"
#include "common/out_of_memory.h"
#include "common/plugins.h"
#include "common/rank_0.h"
#include "common/revision.h"
#include "common/visible_gpu.h"
#include "records/log_record.h"
#include "step/compute_threads.h"
#include "step/stopping.h"

namespace syncbn::train {
namespace {

// The launcher takes up to a second to end the other ranks.
constexpr auto kPeerErrorDelay = std::chrono::seconds(2);

struct RankEnv {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
};

std::optional<int> int_from_environment(const char* name, int64_t min) {
  const auto value = base::env_int(name, min, std::numeric_limits<int>::max());
  return value ? std::optional(static_cast<int>(*value)) : std::nullopt;
}

RankEnv read_rank_env(int local_rank) {
  const auto rank = int_from_environment("RANK", 0);
  const auto world_size = ranks_of_job();
  if (rank.has_value() != world_size.has_value()) {
    throw base::UserError(fmt::format(
        "the environment sets {} but not {}; start the program with syncbn-launch, which sets "
        "both, or unset it to run one process",
        rank ? fmt::format("RANK={}", *rank) : fmt::format("WORLD_SIZE={}", *world_size),
        rank ? "WORLD_SIZE" : "RANK"));
  }
  const RankEnv env{rank.value_or(0), world_size.value_or(1), local_rank};
  if (env.rank >= env.world_size) {
    throw base::UserError(
        fmt::format("RANK={} is not below WORLD_SIZE={}", env.rank, env.world_size));
  }
  return env;
}

/// Runs work before the ranks are connected. Local rank 0 reports its mistake at once. The other
/// ranks cannot know whether they share it: they wait before they report theirs, and the launcher
/// ends them meanwhile if local rank 0 has failed.
template <class Work>
auto local_rank_0_first(int local_rank, const Work& work) {
  try {
    return work();
  } catch (const base::UserError&) {
    if (local_rank != 0) std::this_thread::sleep_for(kQuietExitDelay);
    throw;
  }
}

/// Writes the message to the launcher's error file, in the form of torch's @record. torchrun finds
/// by the time which rank failed first.
void leave_error_file(const std::exception& error) {
  const auto file = base::env("TORCHELASTIC_ERROR_FILE");
  if (!file) return;
  const std::string what = error.what();
  const auto time = std::to_string(static_cast<int64_t>(unix_time()));
  const nlohmann::json record{
      {"message",
       {{"message", what.substr(0, what.find("\nException raised from"))},  // a page of frames
        {"extraInfo", {{"timestamp", time}}}}}};
  std::ofstream(*file) << record.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

struct GroupGuard {
  // After an exception, the rank does not leave the group: the others would then repeat what this
  // rank reports. The process ends soon, and its exit code tells them more.
  ~GroupGuard() {
    if (std::uncaught_exceptions() == 0) dist::destroy_process_group();
  }
};

// Commands that run on all ranks of a job, as training does.
constexpr const char* kEval = "eval";
constexpr const char* kPredict = "predict";

/// A command that runs in one process: of the ranks that a launcher starts, in rank 0.
struct SingleCommand {
  const char* name;
  /// Whether its arguments are those of a run: --check_options reads them too.
  bool takes_keys;
  /// @param args what follows the command's name
  int (*run)(const std::vector<std::string>& args);
};

constexpr SingleCommand kSingleCommands[] = {
    {"check", true, check},
    {"compare", false, compare_command},
    {"export", true, export_checkpoint},
    {"profile", false, profile_command},
    {"report", false, report_command},
    {"sweep", false, sweep},
    {"watch", false, watch},
};

const SingleCommand* find_single(const std::string& name) {
  const auto* const found = std::ranges::find(kSingleCommands, name, &SingleCommand::name);
  return found == std::end(kSingleCommands) ? nullptr : found;
}

/// The split that `train eval` evaluates on.
data::Split split_of(const config::CommandLine& line) {
  for (const auto split : {data::Split::kTrain, data::Split::kVal}) {
    if (to_string(split) == line.value("split")) return split;
  }
  return data::Split::kTest;
}

/// Removes a command from the front of the command line; kTraining if it has none.
std::string take_command(std::vector<std::string>& args) {
  const std::string first = args.empty() ? "" : args.front();
  if (first == kEval || first == kPredict || find_single(first) != nullptr) {
    args.erase(args.begin());
    return first;
  }
  const bool is_word =
      !first.starts_with('-') && first.find('=') == first.npos && !base::exists(first);
  const std::string advice = is_word ? did_you_mean_command(first) : "";
  if (!advice.empty()) {
    throw base::UserError(
        fmt::format("train has no command '{}'{}", base::printable(first), advice));
  }
  return kTraining;
}

/// Removes the images of `predict` from the front of its arguments.
std::string take_images(std::vector<std::string>& args) {
  if (args.size() < 2 || args[0].empty() || args[0].starts_with('-')) {
    throw base::UserError(
        "predict: name an image or a folder of them, then the run: train predict IMAGES runs/NAME");
  }
  const std::string images = args[0];
  args.erase(args.begin());
  return images;
}

/// Checks that all ranks of this node can have their threads at the same time.
void check_threads_of_all(const LoaderConfig& loader) {
  constexpr int kGroupThreads = 8;  // store, Gloo, peer monitor, shared memory
  constexpr int kLoaders = 2;       // of the training and the test set
  const int threads = at::get_num_threads();
  const int workers = static_cast<int>(loader.num_workers.value.value_or(threads));
  const int ranks = std::min(int_from_environment("LOCAL_WORLD_SIZE", 1).value_or(1), 4096);
  base::check_threads(ranks * (threads + kGroupThreads + kLoaders * workers));
}

/// Registers the networks, data sets and so on that this program and its plug-ins add.
void register_own(const std::vector<std::string>& given, const RegisterAll& register_all) {
  if (register_all) register_from("", register_all);
  // Plug-ins' keys are unknown until they are loaded: the command line is read again afterwards.
  config::Faults ignored;
  load_plugins(parse_arguments(kTraining, given, ignored));
}

/// Warns once if srun or mpirun has started several tasks without a launcher.
void warn_of_lone_tasks() {
  constexpr const char* kVariables[][2] = {{"SLURM_NTASKS", "SLURM_PROCID"},
                                           {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"},
                                           {"PMI_SIZE", "PMI_RANK"}};
  if (base::env("RANK")) return;
  for (const auto& [size, rank] : kVariables) {
    const int tasks = base::parse_number<int>(base::env(size).value_or("")).value_or(1);
    if (tasks < 2 || base::env(rank) != "0") continue;
    return spdlog::warn(
        "{}={}, and no launcher: {} tasks would each train alone, on one rank. For one run of all, "
        "start one task per node: syncbn-launch --nproc_per_node=N train ...",
        size, tasks, tasks);
  }
}

/// Looks for the files that rank 0 will read: the checkpoint of `resume`, or the weights of `init`.
void find_files(const std::string& command, const Config& config) {
  const bool is_init = config.resume.empty() && (command == kTraining || command == "check");
  const std::string& file = is_init ? config.init : config.resume;
  if (file.empty() || file == "auto" || !base::is_missing(file)) return;
  throw base::UserError(fmt::format("{}: cannot read {}: {}", is_init ? "init" : "resume", file,
                                    base::open_error(file, ENOENT)));
}

/// Only a warning: nodes that have yet to join may have other numbers of workers than the launcher
/// has assumed.
void warn_of_batch(const Config& config, int assumed_ranks) {
  try {
    divided_batch(config, assumed_ranks);
  } catch (const base::UserError& mistake) {
    base::write_stderr(
        fmt::format("train: warning: if {} ranks take part: {}\n", assumed_ranks, mistake.what()));
  }
}

/// @param only_checks whether to return once the command line and the configuration are read
int run(const std::vector<std::string>& given, const RankEnv& env, const RegisterAll& register_all,
        bool only_checks) {
  ResolvedConfig resolved;
  Inputs inputs;
  bool evaluates = false;
  std::string images;  // to predict
  config::CommandLine line;
  bool is_dry = false;
  try {
    config::Faults faults;
    auto args = given;
    const std::string command = take_command(args);
    evaluates = command == kEval;
    if (command == kPredict) images = take_images(args);
    register_own(args, register_all);
    const auto print = [&](const std::string& text) {
      if (env.local_rank == 0) base::write_stdout(text);
      return base::kExitOk;
    };
    line = parse_arguments(command, args, faults);
    if (const auto colours = colours_of(line)) base::set_log_colours(*colours);
    if (line.has("nproc_per_node")) {
      faults.add({},
                 "--nproc_per_node: this process is a rank already (RANK is set); give the "
                 "option to the launcher alone");
    }
    if (line.has("version")) {
      return print(fmt::format("train {}{}{}, libtorch {}\n", SYNCBN_VERSION, *kRevision ? " " : "",
                               kRevision, TORCH_VERSION));
    }
    if (line.has("list")) return print(list_of(*line.value("list")));
    if (line.has("print_reference")) return print(config_reference());
    if (line.has("print_help_texts")) return print(help_texts());
    if (line.has("print_schema")) return print(config_json_schema());
    is_dry = line.has("dry_run");
    const data::Split split = split_of(line);
    resolved = resolve_config(line, faults);
    if (line.has("print_config")) {
      return print(config::to_yaml(config::parse_yaml(resolved.text, ""), resolved.origins));
    }
    if (only_checks) {
      if (env.rank == 0) with_place(resolved, [&] { find_files(command, resolved.config); });
      if (command == kTraining) warn_of_batch(resolved.config, env.world_size);
      return base::kExitOk;
    }
    // It may start this program anew, which then reads the files again.
    if (resolved.can_be_reread) spare_waiting_threads(resolved.config, given);
    if (resolved.config.threads > 0) at::set_num_threads(static_cast<int>(resolved.config.threads));
    if (env.local_rank == 0) check_threads_of_all(resolved.config.loader);
    if (images.empty()) {
      with_place(resolved, [&] {
        inputs = explain_out_of_memory(MemoryUse::kSetup, [&] {
          return evaluates ? load_split(resolved.config, split, env.world_size)
                           : load_inputs(resolved.config, env.rank, env.world_size);
        });
      });
    }
  } catch (const base::UserError& error) {
    if (env.local_rank == 0) throw;
    // Without a launcher, nothing ends the ranks that would repeat local rank 0's message.
    if (!base::env("TORCHELASTIC_RUN_ID")) throw QuietExit{error.exit_code()};
    std::this_thread::sleep_for(kQuietExitDelay);
    throw;
  }
  const Config& config = resolved.config;
  warn_of_lone_tasks();
  local_rank_0_first(env.local_rank, [&] {
    if (const auto gpu = config.gpu()) with_place(resolved, [&] { see_only_gpu(*gpu); });
    // cuBLAS reads it at its first use, and is not deterministic without it.
    if (config.deterministic) ::setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
    // libtorch's profiler with CUDA would report a missing GPU as an error.
    if (base::count_gpus_at_hand().value_or(0) == 0)
      ::setenv("KINETO_LOG_LEVEL", "5", /*overwrite=*/0);
    dist::init_process_group({.backend = config.chosen_backend(),
                              .timeout = milliseconds(config.timeout),
                              .connect_timeout = milliseconds(config.connect_timeout),
                              .nccl = config.nccl});
  });
  const GroupGuard guard;
  if (!images.empty()) {
    return predict(config, resolved.text, resolved.name, images,
                   line.value("output").value_or("predictions"), line.has("ema"));
  }
  check_agreement(resolved.text, inputs);
  if (evaluates) {
    return evaluate_checkpoint(config, resolved.name, inputs, line.value("tables").value_or(""));
  }
  if (is_dry) return dry_run(config, resolved.name, inputs);
  return train(config, resolved.text, resolved.name, inputs);
}

}  // namespace

std::optional<int> ranks_of_job() {
  return int_from_environment("WORLD_SIZE", 1);
}

int run_main(int argc, char** argv, const RegisterAll& register_all) {
  const std::vector<std::string> given(argv + 1, argv + argc);
  return base::run_main("train", [&] { return run_command(given, register_all); });
}

int run_command(const std::vector<std::string>& words, const RegisterAll& register_all) {
  std::vector<std::string> given = words;
  const bool only_checks = !given.empty() && given.front() == "--check_options";
  if (only_checks) given.erase(given.begin());
  if (!given.empty() && given.front() == "help") {
    given.front() = "--help";
    // `help --lr` is `help lr`.
    if (given.size() > 1) given[1].erase(0, given[1].find_first_not_of('-'));
  }
  ::signal(SIGXFSZ, SIG_IGN);  // with `ulimit -f`, writes then fail with EFBIG
  const int local_rank = int_from_environment("LOCAL_RANK", 0).value_or(0);
  if (const auto topic = config::help_topic(given)) {
    if (base::env("RANK").value_or("0") != "0") return base::kExitOk;
    base::init_logging(0);
    register_own(given, register_all);
    base::write_stdout(help_of(given, *topic));
    return base::kExitOk;
  }
  const std::string first = given.empty() ? "" : given.front();
  const auto find_rank = [&] {
    return local_rank_0_first(local_rank, [&] {
      const RankEnv env = read_rank_env(local_rank);
      base::init_logging(env.rank);
      return env;
    });
  };
  const SingleCommand* const command = find_single(first);
  if (command != nullptr && only_checks && !command->takes_keys) return base::kExitOk;
  if (command != nullptr && !only_checks) {
    take_held_signals();
    if (const int rank = find_rank().rank; rank != 0) {
      if (!base::env("TORCHELASTIC_RUN_ID")) {
        spdlog::warn(
            "{}: nothing done: RANK={}, and only rank 0 runs this command; unset RANK and "
            "WORLD_SIZE to run it here",
            first, rank);
      }
      return base::kExitOk;
    }
    const std::vector<std::string> args(given.begin() + 1, given.end());
    register_own(args, register_all);
    return command->run(args);
  }
  if (is_evaluation(given) && given.front() != kEval && given.front() != kPredict) {
    given.insert(given.begin(), kEval);
  }
  leave_at_early_signals();
  if (!only_checks && !base::env("RANK")) launch_if_asked(given);
  base::keep_freed_memory();
  const RankEnv env = find_rank();
  try {
    return run(given, env, register_all, only_checks);
  } catch (const dist::PeerError& error) {
    // If that rank has ended, the launcher ends this one by a signal, and only the other's message
    // counts.
    if (const int signal = StopSignals::received(); signal != 0) ::raise(signal);
    if (base::env("TORCHELASTIC_RUN_ID")) std::this_thread::sleep_for(kPeerErrorDelay);
    leave_error_file(error);
    throw;
  } catch (const std::exception& error) {
    if (!only_checks) leave_error_file(error);
    throw;
  } catch (const QuietExit& leave) {
    std::this_thread::sleep_for(kQuietExitDelay);
    return leave.exit_code;
  }
}

std::vector<config::FieldInfo> config_fields() {
  std::vector<config::FieldInfo> fields;
  config::Schema<Config>::get().info("", fields);
  return fields;
}

std::string config_json_schema() {
  return config::json_schema(config::Schema<Config>::get(), "A configuration of syncbn's train");
}

std::string config_reference() {
  return "# Configuration\n\n"
         "Every key of a configuration file of `train`. On the command line each can be set as "
         "`--KEY VALUE`.\n"
         "This page is made by `train --print_reference`.\n\n" +
         config::markdown_reference(config_fields());
}

}  // namespace syncbn::train
