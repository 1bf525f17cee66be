#include "batch_norm/statistics_scopes.h"

#include <syncbn/base/error.h>

#include <utility>

namespace syncbn::dist::detail {

thread_local BatchStatisticsRecorder* BatchStatisticsRecorder::current = nullptr;
thread_local TapeScope* TapeScope::current_ = nullptr;

TapeScope::TapeScope(StatisticsTape& tape, Mode mode)
    : tape_(tape), mode_(mode), outer_(std::exchange(current_, this)) {}

TapeScope::~TapeScope() {
  current_ = outer_;
}

at::Tensor TapeScope::next(const std::function<at::Tensor()>& exchange) {
  TapeScope* const scope = current_;
  if (scope == nullptr) return exchange();
  if (scope->mode_ == Mode::kRecord) {
    // The outer scopes decide whether to exchange or to replay an outer recomputation.
    struct Outside {
      explicit Outside(TapeScope* inner) : inner(inner) { current_ = inner->outer_; }
      ~Outside() { current_ = inner; }
      TapeScope* const inner;
    } const outside(scope);
    scope->tape_.push_back(next(exchange));
    return scope->tape_.back();
  }
  if (scope->position_ == scope->tape_.size()) {
    throw base::UserError(
        "checkpoint: the recomputation runs more SyncBatchNorm layers than the forward did; the "
        "function must do the same both times");
  }
  return scope->tape_[scope->position_++];
}

}  // namespace syncbn::dist::detail
