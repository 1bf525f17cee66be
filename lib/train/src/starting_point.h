#pragma once

#include <filesystem>
#include <string>

#include <syncbn/train/config.h>

namespace syncbn::train {

/// Where a run writes to, and what it goes on from.
struct StartingPoint {
  std::string checkpoint;  ///< its bytes, the same on all ranks; empty: the run begins anew

  // Rank 0's only.
  std::string checkpoint_path;
  std::filesystem::path folder;
  bool continues_folder = false;  ///< the run that the folder holds is the one that goes on
};

/// Finds it by the configuration; after a restart, by what the attempt before has left. Writes
/// nothing. Every rank calls it.
/// @throws base::UserError on rank 0, LeaveSilently on the others, when the folder is taken or the
///   checkpoint cannot be read or is damaged.
StartingPoint find_starting_point(const Config& config, const std::string& name);

}  // namespace syncbn::train
