#include "resume.h"

#include <fmt/format.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/config/yaml.h>
#include <syncbn/train/checkpoint.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <string_view>
#include <system_error>

#include "rank_0.h"
#include "run_folder.h"

namespace syncbn::train {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kKeysThatMayChange[] = {"run_dir",         "resume",
                                                   "overwrite",       "epochs",
                                                   "threads",         "timeout",
                                                   "connect_timeout", "backend",
                                                   "log_interval",    "loader.num_workers",
                                                   "loader.prefetch", "loader.pin_memory",
                                                   "loader.timeout"};

/// The folder of the previous attempt, if the launcher has restarted the workers.
std::optional<fs::path> previous_folder(const Config& config, const std::string& name) {
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
  const bool exists = fs::exists(last, ignored);
  // After a restart the previous attempt's checkpoint is newer than the one that it resumed from.
  if (restarted && exists) return last;
  if (config.resume != "auto") return config.resume;
  return exists ? last : fs::path();
}

}  // namespace

ResumeState find_resume_state(const Config& config, const std::string& name) {
  ResumeState state;
  state.checkpoint = on_rank_0([&]() -> std::string {
    const auto previous = previous_folder(config, name);
    const fs::path wanted = previous ? *previous : RunFolder::newest(config.run_dir, name);
    const fs::path checkpoint =
        choose_checkpoint(config, wanted / RunFolder::kLast, previous.has_value());
    state.continues_folder =
        config.resume == "auto" || (!checkpoint.empty() && is_in_folder(checkpoint, wanted));
    state.folder = previous ? *previous
                            : RunFolder::choose(config.run_dir, name, state.continues_folder,
                                                config.overwrite);
    if (checkpoint.empty()) return "";
    state.checkpoint_path = checkpoint.string();
    std::string bytes = base::read_file(checkpoint);
    // Reports a damaged checkpoint before a model is made.
    parse_checkpoint(bytes, state.checkpoint_path);
    return bytes;
  });
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
