#pragma once

#include <vector>

#include <syncbn/dist/process_group.h>

#include "pipeline/stage_run.h"

namespace syncbn::dist::detail {

// A stage's SyncBatchNorm layers and DistributedDataParallel communicate over groups of their own.

/// For stages of one process, whose threads communicate in any order.
/// @throws base::UserError if two of them use one group of several ranks
void check_stages_share_no_group(const std::vector<PlacedStage>& stages);

/// For a stage on each rank. @param pipeline the group of the stages' ranks
/// @throws base::UserError if the stage uses a group with a rank that has another stage
void check_groups_have_one_stage(const PipelineStage& stage, const ProcessGroupPtr& pipeline);

}  // namespace syncbn::dist::detail
