#include "pipeline/stage_groups.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <syncbn/base/error.h>
#include <syncbn/dist/sync_batch_norm.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "batch_norm/convert.h"
#include "batch_norm/named_layers.h"
#include "groups/world.h"

namespace syncbn::dist::detail {
namespace {

/// A group of several ranks that a stage uses.
struct StageGroup {
  std::string user;        ///< "SyncBatchNorm layer 'norm'"
  ProcessGroupPtr group;   ///< null: SyncBatchNorm's private group over these ranks
  std::vector<int> ranks;  ///< in the world
};

std::vector<int> ranks_of(const ProcessGroupPtr& group) {
  std::vector<int> ranks;
  for (int i = 0; i < group->getSize(); ++i) ranks.push_back(world_rank(group, i));
  return ranks;
}

/// The ranks of SyncBatchNorm's private group, which the first exchange creates.
std::vector<int> ranks_of_private_group(int group_size) {
  if (!is_initialized()) return {};
  std::vector<int> ranks(static_cast<size_t>(group_size > 0 ? group_size : world_size()));
  const int size = static_cast<int>(ranks.size());
  std::iota(ranks.begin(), ranks.end(), rank() / size * size);
  return ranks;
}

std::vector<StageGroup> groups_of(const PipelineStage& stage) {
  std::vector<StageGroup> all;
  const auto add = [&](const std::string& user, const ProcessGroupPtr& group, int group_size) {
    StageGroup one{user, group, group ? ranks_of(group) : ranks_of_private_group(group_size)};
    if (one.ranks.size() > 1) all.push_back(std::move(one));
  };
  for_each_named_module(stage.module(), [&](const std::string& name, const auto& module) {
    const std::string user =
        name.empty() ? "SyncBatchNorm" : fmt::format("SyncBatchNorm layer '{}'", name);
    if (const auto* const layer = module.template as<SyncBatchNormImpl>()) {
      add(user, layer->options.process_group(), layer->options.group_size());
    }
    const NormTensors tensors = norm_tensors(module);
    if (const auto group = converted_group(tensors.running_mean, tensors.weight)) {
      add(user, *group, /*group_size=*/0);
    }
  });
  if (stage.ddp() != nullptr) add("DistributedDataParallel", stage.ddp()->process_group(), 0);
  return all;
}

}  // namespace

void check_stages_share_no_group(const std::vector<PlacedStage>& stages) {
  std::vector<std::pair<const PlacedStage*, StageGroup>> seen;
  for (const PlacedStage& placed : stages) {
    const std::vector<StageGroup> own = groups_of(placed.stage);
    for (const StageGroup& one : own) {
      for (const auto& [before, other] : seen) {
        if (one.group != other.group || one.ranks != other.ranks) continue;
        throw base::UserError(fmt::format(
            "PipelineParallel: {} of {} and {} of {} use one process group, of ranks {}, at the "
            "same time. Give each stage a group of its own from new_group(): process_group() of "
            "its SyncBatchNorm layers, the group of convert_sync_batchnorm() and of "
            "DistributedDataParallel",
            other.user, before->name(), one.user, placed.name(), fmt::join(one.ranks, ", ")));
      }
    }
    for (const StageGroup& one : own) seen.emplace_back(&placed, one);
  }
}

void check_groups_have_one_stage(const PipelineStage& stage, const ProcessGroupPtr& pipeline) {
  if (backend_of(pipeline) == nullptr) return;  // the world ranks are unknown
  const std::vector<int> ranks = ranks_of(pipeline);
  const int index = pipeline->getRank();
  for (const StageGroup& one : groups_of(stage)) {
    if (one.group && backend_of(one.group) == nullptr) continue;
    for (int other = 0; other < static_cast<int>(ranks.size()); ++other) {
      const int rank = ranks[static_cast<size_t>(other)];
      if (other == index || std::ranges::count(one.ranks, rank) == 0) continue;
      throw base::UserError(fmt::format(
          "PipelineParallel: {} of stage {} ({}) uses a process group of ranks {}, but rank {} has "
          "stage {}. Give SyncBatchNorm layers and DistributedDataParallel a group of the ranks "
          "with the same stage, and PipelineOptions::process_group the ranks of one pipeline",
          one.user, index, stage.module().name(), fmt::join(one.ranks, ", "), rank, other));
    }
  }
}

}  // namespace syncbn::dist::detail
