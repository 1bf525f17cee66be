#pragma once

#include <string>

#include <syncbn/dist/process_group.h>

#include "transport/backend.h"

namespace syncbn::dist::detail {

/// The backend of a group that this library made; null for a group made elsewhere.
Backend* backend_of(const ProcessGroupPtr& group);

/// What messages call a rank of the group: its rank in the world, where that is known.
int world_rank(const ProcessGroupPtr& group, int64_t rank);

/// Whether every rank of the group runs this library, rather than Python's torch.distributed. If
/// not, only the collectives that Python's ranks call may be issued, one for one; anything else has
/// to go through the store. An empty group means the default one. False for a group made elsewhere
/// if Python has ranks in the job.
bool all_ranks_are_ours(const ProcessGroupPtr& group);

/// The group over which batch-norm statistics are exchanged: `group` itself, or, when it is empty,
/// a separate group over all ranks, made at first use: gradient buckets and forward collectives may
/// be ordered differently on different ranks. Null for a world of one without a process group.
/// @throws base::UserError when WORLD_SIZE is above 1 and init_process_group was not called, or
///   when not all ranks are ours.
ProcessGroupPtr statistics_group(const ProcessGroupPtr& group);

/// The same over `group_size` neighbouring ranks.
/// @throws base::UserError also when the ranks cannot be split into such groups.
ProcessGroupPtr statistics_subgroup(int group_size);

}  // namespace syncbn::dist::detail
