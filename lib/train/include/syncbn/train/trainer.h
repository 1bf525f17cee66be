#pragma once

#include <string>

#include <syncbn/train/config.h>
#include <syncbn/train/inputs.h>

namespace syncbn::train {

/// Thrown on ranks that exit without a message of their own, with rank 0's exit code.
struct QuietExit {
  int exit_code;
};

/// Trains on all ranks of the default process group. SIGINT and SIGTERM stop it after a step.
///
/// Rank 0 writes the run's folder: config.yaml, log.jsonl, last.pt after each epoch and at a stop,
/// best.pt at the best test accuracy so far, result.json when all epochs are done.
///
/// @param config_text the resolved configuration as YAML
/// @param name of the configuration; the default folder is runs/NAME
/// @return 0, or 128 + N when signal N stopped the run after it saved a checkpoint
/// @throws base::UserError on rank 0, QuietExit on the others, when the folder holds another run or
///   cannot be made, the checkpoint to resume is damaged or does not fit the configuration, or the
///   loss is not finite. base::UnavailableError on rank 0, QuietExit on the others, when the disk
///   fails; base::UnavailableError on any rank when a peer fails.
int train(const Config& config, const std::string& config_text, const std::string& name,
          const Inputs& inputs);

}  // namespace syncbn::train
