#include "workers/worker_progress.h"

#include <algorithm>
#include <utility>

namespace syncbn::launch {

void WorkerProgress::update(const syncbn_agent_record& record, Clock::time_point now) {
  if (!std::exchange(reports_, true)) since_ = now;
  if (record.kind == SYNCBN_AGENT_CLEAR) return;
  if (record.kind == SYNCBN_AGENT_LOG || record.kind == SYNCBN_AGENT_RESUME) {
    (record.kind == SYNCBN_AGENT_LOG ? notes_.log : notes_.resume) = record.text;
    return;
  }
  // Upper bound on the time that a worker may ask for.
  constexpr uint64_t kMaxTime = uint64_t{7} * 86'400'000;  // ms
  const std::chrono::milliseconds time(std::min(record.done, kMaxTime));
  if (record.kind == SYNCBN_AGENT_TIMEOUT) {
    timeout_ = time;
    return;
  }
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
  allowance_ = record.kind == SYNCBN_AGENT_PHASE ? time : std::chrono::milliseconds(0);
}

void WorkerProgress::update(const RankMemory::Counts& calls, Clock::time_point now) {
  if (calls.started != calls_.started || calls.ended != calls_.ended) since_ = now;
  calls_ = calls;
}

std::optional<Clock::duration> WorkerProgress::stalled_for(Clock::time_point now) const {
  if (steps_ == 0 && calls_.started == calls_.ended) return std::nullopt;
  return now - since_ - allowance_;
}

void WorkerProgress::describe(WorkerState& worker, Clock::time_point now) const {
  worker.reports = reports_;
  worker.steps = steps_;
  worker.reported_ns = reported_ns_;
  worker.collective = collective_;
  worker.doing = doing_;
  using Seconds = std::chrono::duration<double>;
  if (reports_) worker.idle_seconds = Seconds(now - since_).count();
  worker.calls = calls_.started;
  worker.own_seconds = calls_.own_seconds;
  worker.gpu = calls_.gpu;
  worker.allowed_seconds = std::max(0.0, Seconds(allowance_ - (now - since_)).count());
}

}  // namespace syncbn::launch
