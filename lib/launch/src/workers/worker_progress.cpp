#include "workers/worker_progress.h"

#include <algorithm>
#include <utility>

namespace syncbn::launch {

void WorkerProgress::update(const syncbn_agent_record& record, Clock::time_point now) {
  if (!std::exchange(reports_, true)) since_ = now;
  if (record.kind == SYNCBN_AGENT_CLEAR) return;
  reported_ns_ = record.time_ns;
  if (record.kind == SYNCBN_AGENT_WAITING) {
    collective_ = record.done;
    doing_ = record.text;
    return;
  }
  // A program may repeat its record from a thread of its own, which is no progress.
  const bool is_new = record.kind == SYNCBN_AGENT_PHASE ||
                      (record.kind == SYNCBN_AGENT_HEARTBEAT && record.done != steps_) ||
                      (record.kind == SYNCBN_AGENT_PROGRESS && record.done != bar_);
  if (!is_new) return;
  longest_step_ = std::max(longest_step_, stalled_for(now).value_or(Clock::duration{}));
  if (record.kind == SYNCBN_AGENT_HEARTBEAT) steps_ = record.done;
  if (record.kind == SYNCBN_AGENT_PROGRESS) bar_ = record.done;
  since_ = now;
  if (std::exchange(collective_, 0) > 0) doing_.clear();
  if (std::exchange(in_phase_, record.kind == SYNCBN_AGENT_PHASE)) doing_.clear();
  if (record.kind != SYNCBN_AGENT_HEARTBEAT) doing_ = record.text;
  allowance_ = std::chrono::milliseconds(
      record.kind == SYNCBN_AGENT_PHASE ? std::min<uint64_t>(record.done, uint64_t{7} * 86'400'000)
                                        : 0);
}

std::optional<WorkerProgress::Clock::duration> WorkerProgress::stalled_for(
    Clock::time_point now) const {
  if (steps_ == 0) return std::nullopt;
  return now - since_ - allowance_;
}

void WorkerProgress::describe(WorkerState& worker, Clock::time_point now) const {
  worker.reports = reports_;
  worker.steps = steps_;
  worker.reported_ns = reported_ns_;
  worker.collective = collective_;
  worker.doing = doing_;
  if (reports_) worker.idle_seconds = std::chrono::duration<double>(now - since_).count();
}

}  // namespace syncbn::launch
