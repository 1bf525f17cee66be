#include "profile/profiler.h"

#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/clock.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <syncbn/dist/collectives.h>
#include <syncbn/dist/process_group.h>

#include <system_error>
#include <utility>

#include "common/rank_0.h"
#include "profile/profile_files.h"
#include "profile/summary.h"

namespace syncbn::train {

namespace fs = std::filesystem;

// Recorded but not used: the first recorded step takes longer.
constexpr int64_t kWarmUpSteps = 1;

Profiler::Profiler(const ProfileConfig& config, const models::Model& model)
    : model_(model), skip_(config.skip), steps_(config.steps) {}

int64_t Profiler::requested(const fs::path& run) {
  constexpr auto kPeriod = std::chrono::seconds(1);
  const auto now = Clock::now();
  if (now - looked_ < kPeriod || steps_ > 0) return 0;  // requests wait for the pending profile
  looked_ = now;
  const fs::path request = ProfileFiles(run).request();
  if (!base::exists(request)) return 0;
  try {
    const auto steps = base::parse_number<int64_t>(base::read_file(request, 100));
    if (steps && *steps > 0 && *steps <= ProfileConfig::kMaxSteps) return *steps;
  } catch (const base::Error&) {
    // The command has withdrawn its request.
  }
  return 0;
}

void Profiler::request(int64_t steps) {
  if (steps == 0 || steps_ > 0) return;
  skip_ = kWarmUpSteps + 1;  // and the rest of the current step
  steps_ = steps;
}

void Profiler::begin_step(int64_t step) {
  if (steps_ == 0 || skip_ > kWarmUpSteps) return;
  if (!recorder_) recorder_ = std::make_unique<Recorder>(model_);
  if (skip_ == 0 && own_.steps == 0) {
    own_ = {.first_step = step};
    pause();
    recorder_->clear();
  }
  if (!recorder_->is_running()) recorder_->start(step);
  step_begin_ = base::unix_ns();
}

bool Profiler::end_step() {
  if (steps_ == 0) return false;
  if (skip_ > 0) {
    --skip_;
    return false;
  }
  own_.step_time += base::unix_ns() - step_begin_;
  ++own_.steps;
  return --steps_ == 0;
}

void Profiler::pause() {
  if (recorder_ && recorder_->is_running()) recorder_->stop();
}

std::vector<std::string> Profiler::write(const fs::path& run) {
  pause();
  RankProfile own = std::exchange(own_, {});
  recorder_->copy_times_to(own);
  const ProfileFiles files(dist::broadcast_bytes(run.string(), 0));
  try {
    if (base::exists(files.folder.parent_path())) {
      recorder_->save(files, dist::rank());
    } else {
      own.failure = fmt::format("{} has no folder {}; its ranks write none", base::hostname(),
                                files.folder.parent_path().string());
    }
  } catch (const base::Error& error) {
    own.failure = error.what();
  }
  recorder_.reset();
  steps_ = 0;
  const std::vector<std::string> gathered = dist::gather_bytes(to_bytes(own), 0);
  if (!is_rank_0()) return {};
  std::vector<RankProfile> profiles;
  std::string failure;
  for (const std::string& bytes : gathered) {
    profiles.push_back(rank_profile_of(bytes));
    if (failure.empty()) failure = profiles.back().failure;
  }
  auto summary = summary_of(profiles);
  std::vector<std::string> lines = table_of(summary);
  const fs::path trace = files.trace(own.first_step, 0);
  if (profiles.front().failure.empty() && base::exists(trace)) {
    summary["trace"] = trace.lexically_relative(run).string();
    lines.push_back(fmt::format("{} opens at https://ui.perfetto.dev", trace.string()));
  }
  try {
    base::write_file_atomically(files.summary(), summary.dump(1) + "\n");
    if (!failure.empty()) spdlog::warn("not all traces were written: {}", failure);
  } catch (const base::Error& error) {
    spdlog::warn("the profile was not written, and training goes on: {}", error.what());
  }
  std::error_code ignored;
  fs::remove(files.request(), ignored);
  return lines;
}

}  // namespace syncbn::train
