#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace syncbn::dist::detail {

/// One forward or backward of a stage.
struct PipelineAction {
  enum class Kind { kForward, kBackward };

  Kind kind;
  /// The micro-batches, which the stage runs as one.
  int64_t first;
  int64_t count = 1;
  /// Start to receive the gradients of this micro-batch before sending the outputs of this forward:
  /// over NCCL, both ranks of a pair must start their transfers in the same order.
  std::optional<int64_t> expects_gradients_of = std::nullopt;

  bool operator==(const PipelineAction&) const = default;
};

using PipelineActions = std::vector<PipelineAction>;

/// All forwards.
/// @param whole_batch the stage runs all micro-batches as one
PipelineActions forward_actions(int64_t micro_batches, bool whole_batch);
/// All forwards, then all backwards.
PipelineActions gpipe_actions(int64_t micro_batches, bool whole_batch);
/// As many forwards as there are later stages, then one forward and one backward in turn (1F1B).
PipelineActions one_forward_one_backward_actions(int64_t micro_batches, int stage, int stages);

}  // namespace syncbn::dist::detail
