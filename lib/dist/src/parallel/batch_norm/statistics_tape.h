#pragma once

#include <functional>
#include <vector>

#include "batch_norm/batch_norm_kernels.h"

namespace syncbn::dist::detail {

/// The statistics by which the layers of a stretch of forward normalised, in order, so that its
/// recomputation uses them instead of exchanging again.
using StatisticsTape = std::vector<MergedMoments>;

/// While it lives, this thread's layers write their statistics down, or read them back. Scopes
/// nest: what an outer one reads back is what an inner one writes down.
class TapeScope {
 public:
  enum class Mode { kRecord, kReplay };
  TapeScope(StatisticsTape& tape, Mode mode);
  ~TapeScope();
  TapeScope(const TapeScope&) = delete;
  TapeScope& operator=(const TapeScope&) = delete;

  static bool is_open() { return current_ != nullptr; }

  /// The next layer's statistics: read back, or else made by `exchange`.
  /// @throws base::UserError when the recomputation runs more layers than there were.
  static MergedMoments next(const std::function<MergedMoments()>& exchange);

 private:
  static thread_local TapeScope* current_;
  StatisticsTape& tape_;
  const Mode mode_;
  size_t position_ = 0;  ///< of the next to be read back
  TapeScope* const outer_;
};

}  // namespace syncbn::dist::detail
