#pragma once

#include <string>

#include <syncbn/train/config.h>
#include <syncbn/train/inputs.h>

namespace syncbn::train {

/// Thrown on ranks that have nothing to add to what rank 0 says: to leave with its code.
struct LeaveSilently {
  int exit_code;
};

/// Trains as described, on all ranks of the default process group together. SIGINT, SIGTERM and the
/// like are caught meanwhile, and stop the run at a step's end.
///
/// Rank 0 writes the run's folder: config.yaml, log.jsonl, last.pt after each epoch and at a stop,
/// best.pt at the best test accuracy so far, result.json when all epochs are done.
///
/// @param config_text the resolved configuration as YAML.
/// @param name of the configuration, after which the default folder is called.
/// @return 0, or 128 + N when signal N stopped the run at a step's end, with all of it saved.
/// @throws base::UserError on rank 0 (LeaveSilently on the others) when the run's folder is taken,
///   or cannot be made, the checkpoint to resume is damaged or does not fit, or the loss is not
///   finite any more; the same for base::UnavailableError when the disk fails; on any rank when a
///   peer fails.
int train(const Config& config, const std::string& config_text, const std::string& name,
          const Inputs& inputs);

}  // namespace syncbn::train
