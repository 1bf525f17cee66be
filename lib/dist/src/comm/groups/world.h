#pragma once

#include <vector>

#include <syncbn/dist/process_group.h>

#include "transport/backend.h"

namespace syncbn::dist::detail {

/// The backend of a group of this library; null for a group that this library did not make.
Backend* backend_of(const ProcessGroupPtr& group);

/// The groups of this process that still exist.
std::vector<ProcessGroupPtr> living_groups();

/// As init_process_group(), over a store that the caller has opened. A creator of c10d's backends
/// calls it; shutdown() of the group's backend calls destroy_process_group().
/// @param options with rank and world_size
/// @param gpu as find_own_gpu()'s index
ProcessGroupPtr init_process_group(const c10::intrusive_ptr<c10d::Store>& opened,
                                   const InitOptions& options, std::optional<int> gpu);

/// Forms a group over the given ranks of the world, in this order. Unlike new_group(), only its
/// members call it. The world keeps the group until shutdown() of its backend.
/// @param name unique among the groups of the world
ProcessGroupPtr join_group(const std::string& name, const std::vector<int>& ranks,
                           std::chrono::milliseconds timeout);

/// A rank of a group as messages name it: the rank in the world, if known.
int world_rank(const ProcessGroupPtr& group, int64_t rank);

/// Whether every rank of the group (empty: the default group) runs this library. If some run
/// Python's torch.distributed, only the collectives that they call may be issued, one for one. If
/// the job has Python ranks, false for a group that this library did not make.
bool all_ranks_are_ours(const ProcessGroupPtr& group);

/// The group over which batch-norm statistics are exchanged: `group`, or if it is empty a separate
/// group over all ranks, because the order of gradient buckets and forward collectives may differ
/// between ranks. Null for a world of one.
/// @throws base::UserError if WORLD_SIZE is above 1 and init_process_group was not called, or if a
///   rank is not ours.
ProcessGroupPtr statistics_group(const ProcessGroupPtr& group);

/// statistics_group({}) over `group_size` neighbouring ranks.
/// @throws base::UserError also if the ranks cannot be split into such groups.
ProcessGroupPtr statistics_subgroup(int group_size);

}  // namespace syncbn::dist::detail
