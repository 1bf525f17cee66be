#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace syncbn::dist::detail {

/// What a stage does next.
struct PipelineAction {
  enum class Kind { kForward, kBackward };

  Kind kind;
  /// The micro-batches, which are run as one.
  int64_t first;
  int64_t count = 1;
  /// Ask for the gradients of these before sending the outputs of this forward. Over NCCL a pair of
  /// ranks must start its transfers in one order.
  std::optional<int64_t> expects_gradients_of = std::nullopt;

  bool operator==(const PipelineAction&) const = default;
};

using PipelineActions = std::vector<PipelineAction>;

/// All forwards. @param whole_batch the stage runs all micro-batches as one
PipelineActions forward_actions(int64_t micro_batches, bool whole_batch);
/// All forwards, then all backwards.
PipelineActions gpipe_actions(int64_t micro_batches, bool whole_batch);
/// As many forwards as there are stages behind, then forward and backward by turns.
PipelineActions one_forward_one_backward_actions(int64_t micro_batches, int stage, int stages);

}  // namespace syncbn::dist::detail
