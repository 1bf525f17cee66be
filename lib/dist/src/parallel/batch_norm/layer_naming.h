#pragma once

#include <string>

#include <syncbn/dist/sync_batch_norm.h>

namespace syncbn::dist::detail {

/// Gives SyncBatchNorm layers the names by which messages call them.
class LayerNaming {
 public:
  /// All layers below `module` get their names in it, unless their options have one.
  static void name_layers(const torch::nn::Module& module);
};

/// The group over which a layer exchanges, made at its first use; null: nothing is exchanged.
/// @throws base::UserError as statistics_group() and statistics_subgroup() do.
ProcessGroupPtr statistics_group_of(const SyncBatchNormOptions& options);

}  // namespace syncbn::dist::detail
