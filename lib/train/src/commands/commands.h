#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <syncbn/train/config.h>
#include <syncbn/train/inputs.h>

// The commands of `train` besides training. They return the exit code.
namespace syncbn::train {

// ---- on all ranks of the default process group --------------------------------------------------
// When a command fails on one rank, it throws base::UserError there and QuietExit on the others.

/// `train --dry_run`: takes a few steps on every rank, and logs what a run would cost: parameters,
/// multiply-adds, time of a step, memory, duration. Writes nothing.
int dry_run(const Config& config, const std::string& name, const Inputs& inputs);

/// `train eval`: evaluates a checkpoint on `inputs.eval_set`. Rank 0 logs the results and, unless
/// stdout is a terminal, prints them as a line of JSON. The checkpoint is the one that `resume`
/// names, or best.pt or last.pt of the newest run.
/// @param tables the folder for the task's tables; empty: none are written
int evaluate_checkpoint(const Config& config, const std::string& name, const Inputs& inputs,
                        const std::filesystem::path& tables);

/// `train predict FOLDER`: runs the network of a checkpoint on each image in the folder, and writes
/// the task's answers into the folder `output`. Each rank takes its share of the images.
/// @param text of the configuration, in YAML
/// @param name of the run
/// @param average whether to use the moving average of the weights
/// @throws base::UserError on all ranks with an image that cannot be read
int predict(const Config& config, const std::string& text, const std::string& name,
            const std::string& images, const std::string& output, bool average);

/// The number of ranks, if a launcher has started this process.
std::optional<int> ranks_of_job();

// ---- in one process: rank 0 of a launcher. `args` are those after the command's name -----------

/// `train check`: reads each sample of a configuration's data once, as a run would, and names all
/// that a run could not use. Under a launcher, the run is one of all its ranks.
/// @throws base::UserError when there are such samples, or when the configuration or the data is
///   refused before a sample is read
int check(const std::vector<std::string>& args);

/// `train export`: writes the network of a checkpoint to a file for other programs, beside the
/// checkpoint unless told otherwise.
int export_checkpoint(const std::vector<std::string>& args);

/// `train profile RUN [--steps N]`: makes the run that writes to the folder RUN profile its next
/// steps, waits for the profile, and prints its table.
/// @throws base::UserError when no process trains in RUN; base::UnavailableError when the run ends
///   first, or could not write its profile
int profile_command(const std::vector<std::string>& args);

/// `train sweep`: trains a run for each combination of values, one after the other, each in its own
/// process. Skips finished runs and resumes others. Ends with a table on stdout, and sweep.csv in
/// the sweep's folder.
/// @return 0; the code of the first run that failed; or after a signal 128 + SIGINT for SIGINT and
///   base::kExitPreempted for all else
/// @throws base::UserError before the first run, for a mistake in any run's configuration
int sweep(const std::vector<std::string>& args);

/// `train watch RUN`: shows a run on the terminal until it ends. Without a terminal, prints its
/// state once and then a line for each epoch.
/// @throws base::UserError when RUN is not the folder of a run
int watch(const std::vector<std::string>& args);

// ---- without a run ------------------------------------------------------------------------------

/// The text of `train --list KIND`: what a configuration chooses from, with its options.
/// @param wanted "models"
/// @throws base::UserError for an unknown kind
std::string list_of(const std::string& wanted);

}  // namespace syncbn::train
