#pragma once

#include <filesystem>
#include <string>

#include <syncbn/base/unique_fd.h>

namespace syncbn::train {

/// Makes a folder, and locks it by its file `.lock` for as long as the descriptor is open. NFS
/// supports these locks. On file systems without locks the descriptor locks nothing.
/// @param advice completes the message "another process is writing to FOLDER; ..."
/// @throws base::UserError when another process keeps it locked for 3 s.
base::UniqueFd lock_folder(const std::filesystem::path& folder, const std::string& advice);

/// Whether a process has locked a folder.
bool is_locked(const std::filesystem::path& folder);

}  // namespace syncbn::train
