#include "pipeline/schedule.h"

#include <algorithm>

namespace syncbn::dist::detail {
namespace {

using Kind = PipelineAction::Kind;

void append_all(PipelineActions& actions, Kind kind, int64_t micro_batches, bool whole_batch) {
  const int64_t count = whole_batch ? micro_batches : 1;
  for (int64_t first = 0; first < micro_batches; first += count) {
    actions.push_back({.kind = kind, .first = first, .count = count});
  }
}

}  // namespace

PipelineActions forward_actions(int64_t micro_batches, bool whole_batch) {
  PipelineActions actions;
  append_all(actions, Kind::kForward, micro_batches, whole_batch);
  return actions;
}

PipelineActions gpipe_actions(int64_t micro_batches, bool whole_batch) {
  PipelineActions actions = forward_actions(micro_batches, whole_batch);
  append_all(actions, Kind::kBackward, micro_batches, whole_batch);
  return actions;
}

PipelineActions one_forward_one_backward_actions(int64_t micro_batches, int stage, int stages) {
  PipelineActions actions;
  const int64_t ahead = std::min<int64_t>(stages - 1 - stage, micro_batches);
  for (int64_t i = 0; i < micro_batches + ahead; ++i) {
    if (i < micro_batches) {
      actions.push_back({.kind = Kind::kForward, .first = i});
      if (ahead > 0 && i >= ahead) actions.back().expects_gradients_of = i - ahead;
    }
    if (i >= ahead) actions.push_back({.kind = Kind::kBackward, .first = i - ahead});
  }
  return actions;
}

}  // namespace syncbn::dist::detail
