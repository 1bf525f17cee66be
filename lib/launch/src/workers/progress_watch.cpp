#include "workers/progress_watch.h"

#include <fmt/format.h>
#include <syncbn/base/env.h>
#include <syncbn/base/text.h>

#include <algorithm>
#include <string>
#include <utility>

#include "common/descriptors.h"

namespace syncbn::launch {
namespace {

// Interval for reading the records of workers that have already sent some, so that many quick
// workers do not wake the launcher more often. A pipe holds 256 records.
constexpr std::chrono::milliseconds kRecordPeriod{100};

// How often the launcher checks whether the workers make progress.
constexpr std::chrono::milliseconds kCheckPeriod{500};

// A rank for which others wait is named after this time, even without --hang_timeout.
constexpr std::chrono::seconds kNameAfter{30};

// How often to look for the rank that holds up the others: to end it, and only to name it.
constexpr std::chrono::seconds kStallReportPeriod{2};
constexpr std::chrono::seconds kNamePeriod{10};

}  // namespace

ProgressWatch::ProgressWatch(const LaunchOptions& options, Output& output, NodeLink& link,
                             int attempt, std::vector<Worker>& workers, Clock::time_point now)
    : options_(options),
      output_(output),
      link_(link),
      attempt_(attempt),
      workers_(workers),
      started_(now),
      next_check_(now + kCheckPeriod) {}

void ProgressWatch::add_to(std::vector<pollfd>& polls) const {
  for (const Worker& worker : workers_) {
    if (worker.agent && !worker.progress.reports()) {
      polls.push_back({worker.agent.get(), POLLIN, 0});
    }
  }
}

Clock::time_point ProgressWatch::due() const {
  auto due = next_check_;
  for (const auto& time : {next_records_, bar_.due()}) {
    if (time) due = std::min(due, *time);
  }
  return due;
}

void ProgressWatch::read(Worker& worker) {
  const auto now = Clock::now();
  ReadBuffer buffer;
  worker.records.feed(read_some(worker.agent, buffer), [&](const syncbn_agent_record& record) {
    worker.progress.update(record, now);
    if (!next_records_) next_records_ = now + kRecordPeriod;
    if (worker.process.rank == 0) bar_.update(record, now);
  });
  worker.process.step = worker.progress.step();
}

void ProgressWatch::read_all() {
  const auto now = Clock::now();
  const bool are_due = !next_records_ || now >= *next_records_;
  for (Worker& worker : workers_) {
    if (are_due || !worker.progress.reports()) read(worker);
  }
  if (next_records_ && are_due) next_records_ = now + kRecordPeriod;
  const auto due = bar_.due();
  if (due && now >= *due) output_.set_bar(bar_.draw(base::terminal_columns(), now));
}

std::vector<WorkerState> ProgressWatch::states() {
  std::vector<WorkerState> all;
  for (Worker& worker : workers_) {
    read(worker);
    WorkerState state{
        .rank = worker.process.rank, .host = base::hostname(), .pid = worker.process.pid};
    worker.progress.describe(state, Clock::now());
    if (worker.process.running) {
      look_at_process(state);
      const auto record = worker.calls.counts() ? worker.calls.read() : std::nullopt;
      if (record) describe_calls(*record, state);
    }
    all.push_back(std::move(state));
  }
  return all;
}

std::vector<std::string> ProgressWatch::check(bool judges, Clock::time_point now) {
  forgive_own_silence(now);  // this process may also be stopped between two lines of its loop
  next_check_ = now + kCheckPeriod;
  for (Worker& worker : workers_) {
    // Without counts, the process that made the calls has ended.
    worker.progress.update(worker.calls.counts().value_or(RankMemory::Counts{}), now);
  }
  if (!judges) return {};
  warn_of_silence(now);
  judge(now);
  return std::exchange(lines_, {});
}

void ProgressWatch::judge(Clock::time_point now) {
  Clock::duration longest{};
  bool ends = false;
  for (const Worker& worker : workers_) {
    if (!worker.process.running) continue;
    const auto since_progress = worker.progress.stalled_for(now);
    auto stalled = since_progress.value_or(Clock::duration{});
    // A stopped process cannot use its allowance.
    const auto allowance = worker.progress.allowance();
    if (since_progress && allowance.count() > 0 && state_of_process(worker.process.pid) == 'T') {
      stalled += allowance;
    }
    const auto limit = options_.hang_timeout.value_or(worker.progress.timeout());
    const bool is_late = limit.count() > 0 && stalled >= limit;
    ends = ends || is_late;
    longest = std::max(longest, stalled);
    const auto step = worker.progress.longest_step();
    // The time of a step is known from the second one on.
    const bool is_unknown = is_late && step.count() == 0 && worker.progress.step().value_or(0) > 0;
    const bool is_near = step >= timeout() / 2 || is_unknown;
    if (timeout().count() == 0 || !is_near || std::exchange(warned_of_timeout_, true)) continue;
    const std::string limit_text = base::format_seconds(timeout());
    if (is_unknown) {
      lines_.push_back(
          fmt::format("warning: rank {} has reported only one step; if a step may take longer than "
                      "--hang_timeout ({}), raise it to at least twice the longest step",
                      worker.process.rank, limit_text));
    } else {
      lines_.push_back(fmt::format(
          "warning: a step of rank {} took {}, and --hang_timeout is {}: raise --hang_timeout to "
          "at least twice the longest step",
          worker.process.rank, base::format_seconds(step), limit_text));
    }
  }
  if (!ends && (hang_was_named_ || longest < kNameAfter)) return;
  Clock::time_point& next = ends ? next_stall_report_ : next_naming_;
  if (now < next) return;
  next = now + (ends ? kStallReportPeriod : kNamePeriod);
  link_.send(Stalled{attempt_, std::chrono::duration<double>(longest).count(), ends});
}

// Often only rank 0 reports, so the other nodes do not warn.
void ProgressWatch::warn_of_silence(Clock::time_point now) {
  if (timeout().count() == 0 || now - started_ < timeout() || workers_[0].process.rank > 0) return;
  const auto reports = [](const Worker& one) {
    return one.progress.reports() || one.calls.counts();
  };
  if (std::ranges::any_of(workers_, reports) || std::exchange(warned_of_silence_, true)) return;
  lines_.emplace_back(
      "warning: no worker has reported a step yet, so --hang_timeout sees nothing; docs/launch.md "
      "shows how a program reports its steps");
}

void ProgressWatch::hang_was_named(bool stops_time) {
  hang_was_named_ = true;
  if (stops_time) forgive_silence();
}

void ProgressWatch::forgive_own_silence(Clock::time_point now) {
  if (now - next_check_ <= kCheckPeriod) return;
  for (Worker& worker : workers_) worker.progress.forgive(now - next_check_);
  next_check_ = now;
}

void ProgressWatch::forgive_silence() {
  for (Worker& worker : workers_) worker.progress.forgive_all(Clock::now());
}

}  // namespace syncbn::launch
