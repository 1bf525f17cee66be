#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

/// The files of runs: their names, the folder that a run gets, and what a folder holds.
namespace syncbn::train::run_files {

inline constexpr const char* kConfig = "config.yaml";
inline constexpr const char* kLog = "log.jsonl";
inline constexpr const char* kMetrics = "metrics.csv";
inline constexpr const char* kEnvironment = "environment.json";
inline constexpr const char* kLast = "last.pt";        ///< the checkpoint to resume from
inline constexpr const char* kBest = "best.pt";        ///< the network with the best result
inline constexpr const char* kResult = "result.json";  ///< of a finished run
inline constexpr const char* kPictures = "pictures";   ///< a folder
inline constexpr const char* kFirstBatch = "first_batch.csv";
/// A page about the run; see syncbn/train/report.h.
inline constexpr const char* kReport = "report.html";

// ---- the folder of a run ----

/// `wanted`, or runs/`name` if that is empty.
std::filesystem::path wanted_path(const std::string& wanted, const std::string& name);

/// The run in `wanted`, or the one of runs/`name`, runs/name-2, ... whose log was written last.
std::filesystem::path newest(const std::string& wanted, const std::string& name);

/// The folder that a checkpoint lies in, if it is `wanted` or one of runs/`name`, runs/name-2, ...
std::optional<std::filesystem::path> of_checkpoint(const std::filesystem::path& file,
                                                   const std::string& wanted,
                                                   const std::string& name);

/// The folder for a run. With `resume`, newest(). Otherwise wanted_path() or, if that holds a run
/// and `overwrite` is not set, the next free one of runs/name-2, runs/name-3, ... Writes nothing.
/// @throws base::UserError if `wanted` names a folder that holds a run or other files, unless
///   `resume` or `overwrite` is set
std::filesystem::path choose(const std::string& wanted, const std::string& name, bool resume,
                             bool overwrite);

/// The folder that choose() returned in an earlier attempt of the job `id` (SYNCBN_JOB_ID); nothing
/// if no attempt got that far.
std::optional<std::filesystem::path> of_job(const std::string& id, const std::string& wanted,
                                            const std::string& name);

// ---- what a folder holds ----

/// Whether a run has written to the folder: it has files of a run besides a config.yaml.
bool is_run(const std::filesystem::path& folder);
/// Whether the folder holds a finished run.
bool has_result(const std::filesystem::path& folder);
/// Whether a run could resume from the folder: it was stopped or killed after a checkpoint.
bool is_unfinished(const std::filesystem::path& folder);

/// The text of a run's config.yaml; nothing if there is none.
std::optional<std::string> config_of(const std::filesystem::path& folder);

/// last.pt and the checkpoints before it, the newest first.
/// @throws base::UserError or base::UnavailableError if it is unknown whether there is a last.pt
std::vector<std::filesystem::path> checkpoints(const std::filesystem::path& folder);

/// The name of a checkpoint that is kept for its result but is not the best.
std::string best_name(int64_t step);

/// Whether this is best.pt or a best_name(). A checkpoint says which of its run's files are such,
/// and the run renames and removes them.
bool is_best(const std::string& name);

/// The names of the files whose contents last.pt does not have: the log and the best checkpoints.
std::vector<std::string> history(const std::filesystem::path& folder);

/// Call it with the folder locked, for a run that found nothing to lose in the folder before.
/// @throws base::UnavailableError if another run has saved there since
void refuse_if_saved(const std::filesystem::path& folder);

// ---- changes ----

/// Removes temporary files of a killed run, and its result; without `resume`, all files of a run
/// that the folder holds.
/// @throws base::UserError if the folder holds no run, but files that a run would replace
void make_ready(const std::filesystem::path& folder, bool resume);

/// Call it before writing a new last.pt: gives the present one, saved after `step`, a second name,
/// step-STEP.pt, and keeps the newest `keep_last` - 1 of these.
void rotate(const std::filesystem::path& folder, int64_t step, int64_t keep_last);

/// For a run that resumes from `resumed` after `step`: renames checkpoints of later steps to
/// X.abandoned, and last.pt as well unless it is `resumed`. If a later result has moved best.pt
/// aside to best-STEP.pt, renames it back. Removes each best-STEP.pt that is not in `best`.
/// @param best the step of each best checkpoint, by the name of its file
void set_aside_after(const std::filesystem::path& folder, int64_t step,
                     const std::filesystem::path& resumed,
                     const std::map<std::string, int64_t>& best);

}  // namespace syncbn::train::run_files
