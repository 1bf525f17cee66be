#include "pipeline/schedule.h"

#include <algorithm>

namespace syncbn::dist::detail {
namespace {

using Kind = PipelineAction::Kind;

void append_all(PipelineActions& actions, Kind kind, int64_t micro_batches, bool at_once) {
  const int64_t count = at_once ? micro_batches : 1;
  for (int64_t first = 0; first < micro_batches; first += count) {
    actions.push_back({.kind = kind, .first = first, .count = count});
  }
}

}  // namespace

PipelineActions forward_actions(int64_t micro_batches, bool at_once) {
  PipelineActions actions;
  append_all(actions, Kind::kForward, micro_batches, at_once);
  return actions;
}

PipelineActions gpipe_actions(int64_t micro_batches, bool at_once) {
  PipelineActions actions = forward_actions(micro_batches, at_once);
  append_all(actions, Kind::kBackward, micro_batches, at_once);
  return actions;
}

PipelineActions one_forward_one_backward_actions(int64_t micro_batches, int stage, int stages) {
  PipelineActions actions;
  const int64_t ahead = std::min<int64_t>(stages - 1 - stage, micro_batches);
  for (int64_t i = 0; i < micro_batches + ahead; ++i) {
    if (i < micro_batches) {
      actions.push_back({.kind = Kind::kForward, .first = i});
      if (ahead > 0 && i >= ahead) actions.back().asks_for = i - ahead;
    }
    if (i >= ahead) actions.push_back({.kind = Kind::kBackward, .first = i - ahead});
  }
  return actions;
}

}  // namespace syncbn::dist::detail
