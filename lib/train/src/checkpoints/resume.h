#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <syncbn/base/unique_fd.h>
#include <syncbn/train/config.h>

#include "checkpoints/keepers.h"

namespace syncbn::train {

/// What a run resumes from, and the folder that it writes to.
struct ResumeState {
  std::string checkpoint;  ///< its bytes, which may be Python's; empty for a new run
  std::string checkpoint_path;
  std::filesystem::path folder;
  bool continues_folder = false;            ///< the run in `folder` is the one that is resumed
  std::optional<base::UniqueFd> lock = {};  ///< lock_of_run() of `folder`, if a keeper has read it
  int64_t seed = 0;  ///< the configuration's, that of the checkpoint, or a new one
};

/// Follows the configuration or, after a restart, the previous attempt. The newest checkpoint of
/// all keepers counts; keepers that lack the log or the best checkpoints of its run get copies. A
/// keeper locks a run's folder before it reads the checkpoint that the run may still replace.
/// Every rank calls it; the result is the same on all.
/// @throws base::UserError on a keeper, QuietExit on the others, when the folder holds another run
///   or the checkpoint cannot be read or is damaged
ResumeState find_resume_state(const Config& config, const std::string& name,
                              const Keepers& keepers);

/// Settings that differ from those of a checkpoint, for a message. Ignores keys that only say where
/// and for how long a run continues.
/// @throws base::UserError when this configuration cannot use the checkpoint's state; its message
///   calls the checkpoint "it"
std::vector<std::string> changed_settings(const config::Value& checkpoint,
                                          const config::Value& now);

}  // namespace syncbn::train
