#pragma once

#include <functional>
#include <unordered_map>
#include <vector>

#include "batch_norm/batch_norm_kernels.h"

// Objects that change what this thread's layers do with their statistics while the object lives.

namespace syncbn::dist::detail {

/// While one lives, layers record the statistics of their batches in it and do not update their
/// running statistics. At most one per thread.
struct BatchStatisticsRecorder {
  BatchStatisticsRecorder() { current = this; }
  ~BatchStatisticsRecorder() { current = nullptr; }
  BatchStatisticsRecorder(const BatchStatisticsRecorder&) = delete;
  BatchStatisticsRecorder& operator=(const BatchStatisticsRecorder&) = delete;

  static thread_local BatchStatisticsRecorder* current;
  /// The statistics of each batch, in order, by the layer's running mean.
  std::unordered_map<const at::TensorImpl*, std::vector<at::Tensor>> batches;
};

/// The statistics with which the layers of a checkpointed function normalised, in order. The
/// recomputation uses them instead of exchanging again.
using StatisticsTape = std::vector<at::Tensor>;

/// While one lives, layers record their statistics on the tape, or replay them. Scopes nest: an
/// inner scope records what an outer one replays.
class TapeScope {
 public:
  enum class Mode { kRecord, kReplay };
  TapeScope(StatisticsTape& tape, Mode mode);
  ~TapeScope();
  TapeScope(const TapeScope&) = delete;
  TapeScope& operator=(const TapeScope&) = delete;

  static bool is_open() { return current_ != nullptr; }

  /// The next layer's statistics: replayed, or the result of `exchange`.
  /// @throws base::UserError if the recomputation runs more layers than were recorded.
  static at::Tensor next(const std::function<at::Tensor()>& exchange);

 private:
  static thread_local TapeScope* current_;
  StatisticsTape& tape_;
  const Mode mode_;
  size_t position_ = 0;  ///< of the next replay
  TapeScope* const outer_;
};

}  // namespace syncbn::dist::detail
