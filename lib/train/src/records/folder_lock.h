#pragma once

#include <filesystem>
#include <string>

#include <syncbn/base/unique_fd.h>

namespace syncbn::train {

/// Creates a folder and locks it through its file `.lock` while the descriptor is open. Works on
/// NFS. On file systems without locks, the descriptor locks nothing.
/// @param advice completes the message "another process is writing to FOLDER; ..."
/// @throws base::UserError when another process keeps it locked for 3 s.
base::UniqueFd lock_folder(const std::filesystem::path& folder, const std::string& advice);

/// Whether a process has locked a folder.
bool is_locked(const std::filesystem::path& folder);

}  // namespace syncbn::train
