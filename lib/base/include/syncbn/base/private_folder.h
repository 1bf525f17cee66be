#pragma once

#include <filesystem>

namespace syncbn::base {

/// Creates a folder that only its owner can enter, for logs, checkpoints and other files of a job.
/// The umask sets the permissions of missing parents; a folder that exists keeps its own.
/// @return 0, or the errno of the failure.
[[nodiscard]] int make_private_folder(const std::filesystem::path& path);

}  // namespace syncbn::base
