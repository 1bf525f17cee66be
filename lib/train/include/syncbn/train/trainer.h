#pragma once

#include <string>

#include <syncbn/train/config.h>
#include <syncbn/train/inputs.h>

namespace syncbn::train {

/// Thrown on ranks that exit without a message, with the exit code of the rank that reports the
/// error.
struct QuietExit {
  int exit_code;
};

/// Trains on all ranks of the default process group. SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2 and
/// the key max_time stop it after a step.
///
/// Rank 0, or with `checkpoint.on: node` local rank 0 of each node, writes the run's folder:
/// config.yaml, log.jsonl, last.pt (by default after each epoch, and at a stop), best.pt for the
/// best evaluation so far, and result.json when the run has finished.
///
/// @param config_text the resolved configuration as YAML
/// @param name of the configuration; the default folder is runs/NAME
/// @return 0; after a stop, with the run saved, 128 + SIGINT for SIGINT and base::kExitPreempted
///   for all else
/// @throws base::UserError on a rank that writes the folder, QuietExit on the others, when the
///   folder holds another run or cannot be made, or the checkpoint to resume is damaged or does not
///   fit the configuration. base::UnavailableError on such a rank, QuietExit on the others, when
///   the disk fails, or a loss or gradient is not finite (see on_nan). base::UnavailableError on
///   any rank when a peer fails.
int train(const Config& config, const std::string& config_text, const std::string& name,
          const Inputs& inputs);

}  // namespace syncbn::train
