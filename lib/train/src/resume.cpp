#include "resume.h"

#include <fmt/format.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/log.h>
#include <syncbn/config/yaml.h>
#include <syncbn/train/checkpoint.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <random>
#include <string_view>
#include <system_error>

#include "rank_0.h"
#include "run_folder.h"

namespace syncbn::train {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kKeysThatMayChange[] = {"run_dir",
                                                   "resume",
                                                   "overwrite",
                                                   "epochs",
                                                   "threads",
                                                   "timeout",
                                                   "connect_timeout",
                                                   "device",
                                                   "backend",
                                                   "log_interval",
                                                   "loader.num_workers",
                                                   "loader.prefetch",
                                                   "loader.pin_memory",
                                                   "loader.timeout",
                                                   "max_steps",
                                                   "max_time",
                                                   "early_stop.patience",
                                                   "early_stop.min_delta",
                                                   "checkpoint.every",
                                                   "checkpoint.keep_last",
                                                   "checkpoint.keep_best.count"};

/// The folder of the previous attempt, if the launcher has restarted the workers.
std::optional<fs::path> previous_folder(const Config& config, const std::string& name) {
  const auto attempt = base::env_int("SYNCBN_ATTEMPT", 0, std::numeric_limits<int>::max());
  const auto job = base::env("SYNCBN_JOB_ID");
  if (attempt.value_or(0) == 0 || !job) return std::nullopt;
  return RunFolder::of_job(*job, config.run_dir, name);
}

/// A checkpoint's bytes, if there is one in `folder`: the newest whole one. Damaged ones that are
/// newer are set aside.
std::string newest_whole(const fs::path& folder, std::string& path) {
  std::string damage;
  std::vector<fs::path> damaged;
  for (const fs::path& file : RunFolder::checkpoints(folder)) {
    path = file.string();
    std::string bytes = base::read_file(file);
    try {
      parse_checkpoint(bytes, path);
    } catch (const base::UserError& error) {
      if (damage.empty()) damage = error.what();
      damaged.push_back(file);
      continue;
    }
    for (const fs::path& other : damaged) {
      const fs::path aside = other.string() + ".damaged";
      std::error_code ignored;
      fs::rename(other, aside, ignored);
      spdlog::warn("{} is damaged: it is now {}, and the run resumes from {}", other.string(),
                   aside.string(), path);
    }
    return bytes;
  }
  if (!damage.empty()) throw base::UserError(damage);
  path.clear();
  return "";
}

/// The same on all ranks.
int64_t choose_seed(const Config& config, const std::string& checkpoint) {
  if (config.seed) return *config.seed;
  if (!checkpoint.empty()) return parse_checkpoint(checkpoint, "checkpoint").sampler.seed;
  const std::string drawn = on_rank_0([] { return std::to_string(std::random_device()()); });
  return std::stoll(drawn);
}

}  // namespace

ResumeState find_resume_state(const Config& config, const std::string& name) {
  ResumeState state;
  state.checkpoint = on_rank_0([&]() -> std::string {
    const auto previous = previous_folder(config, name);
    const fs::path wanted = previous ? *previous : RunFolder::newest(config.run_dir, name);
    // After a restart the previous attempt's checkpoint is newer than the one that it resumed from.
    std::string bytes;
    if (previous || config.resume == "auto") bytes = newest_whole(wanted, state.checkpoint_path);
    const bool is_named = bytes.empty() && config.resume != "auto" && !config.resume.empty();
    if (is_named) {
      state.checkpoint_path = config.resume;
      bytes = base::read_file(config.resume);
      // Reports a damaged checkpoint before a model is made.
      parse_checkpoint(bytes, state.checkpoint_path);
    }
    const auto own = is_named ? RunFolder::of_checkpoint(config.resume, config.run_dir, name)
                              : std::optional(wanted);
    state.continues_folder = own && (!bytes.empty() || config.resume == "auto");
    state.folder =
        previous || state.continues_folder
            ? own.value_or(wanted)
            : RunFolder::choose(config.run_dir, name, /*resume=*/false, config.overwrite);
    return bytes;
  });
  state.seed = choose_seed(config, state.checkpoint);
  return state;
}

std::vector<std::string> changed_settings(const config::Value& checkpoint,
                                          const config::Value& now) {
  std::vector<std::string> changed;
  for (const auto& [key, before, after] : config::changes(checkpoint, now)) {
    if (key == "optimizer.type") {
      throw base::UserError(fmt::format(
          "it was made with optimizer.type {} and this configuration has {}, which cannot use its "
          "state; set it back, or start a new run without --resume",
          before, after));
    }
    if (std::ranges::find(kKeysThatMayChange, key) != std::end(kKeysThatMayChange)) continue;
    changed.push_back(fmt::format("{} {} (was {})", key, after, before));
  }
  return changed;
}

}  // namespace syncbn::train
