#include "checkpoints/resume.h"

#include <fmt/format.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/log.h>
#include <syncbn/config/yaml.h>
#include <syncbn/dist/collectives.h>
#include <syncbn/train/checkpoint.h>

#include <algorithm>
#include <limits>
#include <random>
#include <system_error>
#include <utility>

#include "checkpoints/python_run.h"
#include "checkpoints/sealed_archive.h"
#include "common/config_keys.h"
#include "common/rank_0.h"
#include "records/run_files.h"
#include "records/run_folder.h"

namespace syncbn::train {
namespace {

namespace fs = std::filesystem;

/// The folder of the previous attempt, if the launcher has restarted the workers.
std::optional<fs::path> previous_folder(const Config& config, const std::string& name) {
  const auto attempt = base::env_int("SYNCBN_ATTEMPT", 0, std::numeric_limits<int>::max());
  const auto job = base::env("SYNCBN_JOB_ID");
  if (attempt.value_or(0) == 0 || !job) return std::nullopt;
  return run_files::of_job(*job, config.run_dir, name);
}

/// A checkpoint on this node's disk.
struct Found {
  std::string bytes = {};  ///< empty: none
  std::string path = {};
  int64_t step = -1;
  int64_t seed = 0;
  std::vector<fs::path> damaged = {};  ///< newer checkpoints that are damaged
  std::string damage = {};             ///< of the newest of them
};

/// Reads a checkpoint and reports damage, before a model is made.
Found read_whole(const fs::path& file) {
  Found found{.bytes = load_file(file), .path = file.string()};
  if (is_of_python(found.bytes) && is_python_run(file)) {
    found.step = 0;
    return found;
  }
  const Checkpoint checkpoint = parse_checkpoint(found.bytes, found.path);
  found.step = checkpoint.step;
  found.seed = checkpoint.sampler.seed;
  return found;
}

/// The newest whole checkpoint in `folder`.
Found newest_whole(const fs::path& folder) {
  Found without;
  for (const fs::path& file : run_files::checkpoints(folder)) {
    try {
      Found found = read_whole(file);
      found.damaged = std::move(without.damaged);
      found.damage = std::move(without.damage);
      return found;
    } catch (const NewerCheckpointError&) {
      throw;  // it is whole: an older one must not take its place
    } catch (const base::UserError& error) {
      if (without.damage.empty()) without.damage = error.what();
      without.damaged.push_back(file);
    }
  }
  return without;
}

void set_aside(const std::vector<fs::path>& damaged, const std::string& resumed) {
  for (const fs::path& file : damaged) {
    const fs::path aside = file.string() + ".damaged";
    std::error_code ignored;
    fs::rename(file, aside, ignored);
    spdlog::warn("{} is damaged: it is now {}, and the run resumes from {}", file.string(),
                 aside.string(), resumed);
  }
}

/// What a keeper finds on its own disk.
struct OwnState {
  Found checkpoint;
  fs::path folder;
  bool continues_folder = false;
  std::optional<base::UniqueFd> lock;  ///< of `folder`
};

/// The lock of a run that is to be read. Nothing if its folder cannot be written to: it may hold a
/// finished run, which is only looked at.
std::optional<base::UniqueFd> lock_to_read(const fs::path& folder) {
  try {
    return lock_of_run(folder);
  } catch (const base::PathError&) {
    return std::nullopt;
  }
}

OwnState own_state(const Config& config, const std::string& name) {
  OwnState own;
  const auto previous = previous_folder(config, name);
  const fs::path wanted = previous ? *previous : run_files::newest(config.run_dir, name);
  // After a restart the previous attempt's checkpoint is newer than the one that it resumed from.
  if (previous || config.resume == "auto") {
    if (run_files::is_run(wanted)) own.lock = lock_to_read(wanted);
    own.checkpoint = newest_whole(wanted);
  }
  std::optional<fs::path> folder = wanted;
  const bool found_any = !own.checkpoint.bytes.empty() || !own.checkpoint.damage.empty();
  if (!found_any && config.resume != "auto" && !config.resume.empty()) {
    if (!is_rank_0()) return own;  // the file needs to be on rank 0's node only
    const fs::path file = run_files::is_run(config.resume)
                              ? fs::path(config.resume) / run_files::kLast
                              : fs::path(config.resume);
    folder = run_files::of_checkpoint(file, config.run_dir, name);
    if (folder && !(own.lock && *folder == wanted)) own.lock = lock_to_read(*folder);
    own.checkpoint = read_whole(file);
    if (is_of_python(own.checkpoint.bytes)) {  // its run continues in a new folder
      folder.reset();
      own.lock.reset();
    }
  }
  own.continues_folder = folder && (!own.checkpoint.bytes.empty() || config.resume == "auto");
  own.folder = previous || own.continues_folder
                   ? folder.value_or(wanted)
                   : run_files::choose(config.run_dir, name, /*resume=*/false, config.overwrite);
  return own;
}

/// With `resume: auto`, a run without a checkpoint begins anew in its folder. If it has finished,
/// the user has removed the checkpoint, and may want to keep the rest.
void refuse_to_replace(const fs::path& folder, const Config& config) {
  if (config.overwrite || !run_files::has_result(folder)) return;
  throw base::UserError(fmt::format(
      "run_dir: {} holds a finished run without a checkpoint to go on from; choose another folder, "
      "or replace the run (--overwrite)",
      folder.string()));
}

/// The first of the ranks with the highest number.
int rank_of_highest(int64_t number) {
  const auto all = dist::all_gather_bytes(std::to_string(number));
  const auto value = [](const std::string& text) { return std::stoll(text); };
  return static_cast<int>(std::ranges::max_element(all, {}, value) - all.begin());
}

}  // namespace

ResumeState find_resume_state(const Config& config, const std::string& name,
                              const Keepers& keepers) {
  OwnState own;
  keepers.each([&] { own = own_state(config, name); });
  const int source = rank_of_highest(own.checkpoint.step);
  const auto shared = [&](const std::string& text) { return dist::broadcast_bytes(text, source); };
  ResumeState state{.checkpoint = shared(own.checkpoint.bytes),
                    .checkpoint_path = shared(own.checkpoint.path),
                    .folder = shared(own.folder.string()),
                    .continues_folder = shared(own.continues_folder ? "yes" : "") == "yes"};
  const std::string resumed =
      state.checkpoint_path + (source == dist::rank() ? "" : fmt::format(" of rank {}", source));
  keepers.each([&] {
    const Found& found = own.checkpoint;
    if (state.checkpoint.empty() && !found.damage.empty()) throw base::UserError(found.damage);
    if (state.checkpoint.empty() && own.continues_folder) refuse_to_replace(own.folder, config);
    set_aside(found.damaged, resumed);
  });
  if (own.folder == state.folder) state.lock = std::move(own.lock);
  const int64_t drawn = own.checkpoint.bytes.empty() ? std::random_device()() : own.checkpoint.seed;
  state.seed = config.seed.value_or(std::stoll(shared(std::to_string(drawn))));
  if (state.continues_folder) {
    keepers.copy_missing(state.folder, run_files::history(state.folder), source);
    return state;
  }
  keepers.each([&] {
    // A folder that is free on one node may hold a run on another.
    if (own.folder == state.folder) return;
    run_files::choose(state.folder, name, /*resume=*/false, config.overwrite);
  });
  return state;
}

std::vector<std::string> changed_settings(const config::Value& checkpoint,
                                          const config::Value& now) {
  std::vector<std::string> changed;
  for (const config::Change& change : config::changes(checkpoint, now)) {
    if (change.path == "optimizer.type") {
      throw base::UserError(fmt::format(
          "it was made with optimizer.type {} and this configuration has {}, which cannot use its "
          "state; set it back, or start a new run without --resume",
          change.before, change.after));
    }
    if (!may_change(change.path)) changed.push_back(change.str());
  }
  return changed;
}

}  // namespace syncbn::train
