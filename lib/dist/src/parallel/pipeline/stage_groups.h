#pragma once

#include <vector>

#include <syncbn/dist/process_group.h>

#include "pipeline/stage_run.h"

namespace syncbn::dist::detail {

// SyncBatchNorm layers and DistributedDataParallel of different stages must not share a group.

/// Checks the stages of one process, whose threads communicate in any order.
/// @throws base::UserError if two stages use the same group of several ranks
void check_stages_share_no_group(const std::vector<PlacedStage>& stages);

/// Checks this rank's stage of a pipeline with one stage per rank.
/// @param pipeline the group of the stages' ranks
/// @throws base::UserError if the stage uses a group with a rank that has another stage
void check_groups_have_one_stage(const PipelineStage& stage, const ProcessGroupPtr& pipeline);

}  // namespace syncbn::dist::detail
