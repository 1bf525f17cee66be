#include "starting_point.h"

#include <syncbn/base/atomic_file.h>
#include <syncbn/base/env.h>
#include <syncbn/train/checkpoint.h>

#include <limits>
#include <optional>
#include <system_error>

#include "rank_0.h"
#include "run_folder.h"

namespace syncbn::train {
namespace {

namespace fs = std::filesystem;

/// Where this run is when the launcher has started the workers again: after a failure, or on
/// other nodes.
std::optional<fs::path> folder_of_attempt_before(const Config& config, const std::string& name) {
  const auto attempt = base::env_int("SYNCBN_ATTEMPT", 0, std::numeric_limits<int>::max());
  const auto job = base::env("SYNCBN_JOB_ID");
  if (attempt.value_or(0) == 0 || !job) return std::nullopt;
  return RunFolder::of_job(*job, config.run_dir, name);
}

bool is_in_folder(const fs::path& file, const fs::path& folder) {
  std::error_code error;
  return fs::equivalent(file.has_parent_path() ? file.parent_path() : fs::path("."), folder, error);
}

fs::path choose_checkpoint(const Config& config, const fs::path& last, bool restarted) {
  std::error_code ignored;
  // After a restart the attempt before counts, whatever it went on from itself.
  if (restarted && fs::exists(last, ignored)) return last;
  if (config.resume != "auto") return config.resume;
  return fs::exists(last, ignored) ? last : fs::path();
}

}  // namespace

StartingPoint find_starting_point(const Config& config, const std::string& name) {
  StartingPoint start;
  start.checkpoint = on_rank_0([&]() -> std::string {
    const auto restarted = folder_of_attempt_before(config, name);
    const fs::path wanted = restarted ? *restarted : RunFolder::wanted_path(config.run_dir, name);
    const fs::path checkpoint =
        choose_checkpoint(config, wanted / RunFolder::kLast, restarted.has_value());
    // Going on with the run of that very folder replaces nothing.
    start.continues_folder =
        config.resume == "auto" || (!checkpoint.empty() && is_in_folder(checkpoint, wanted));
    start.folder = restarted ? *restarted
                             : RunFolder::choose(config.run_dir, name, start.continues_folder,
                                                 config.overwrite);
    if (checkpoint.empty()) return "";
    start.checkpoint_path = checkpoint.string();
    std::string bytes = base::read_file(checkpoint);
    // Its mistakes are said now, before a model is made.
    parse_checkpoint(bytes, start.checkpoint_path);
    return bytes;
  });
  return start;
}

}  // namespace syncbn::train
