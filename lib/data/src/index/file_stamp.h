#pragma once

#include <cstdint>
#include <filesystem>

#include <syncbn/base/unique_fd.h>

namespace syncbn::data::detail {

/// Tells whether a file or folder is still what it was. A folder's changes whenever an entry is
/// added, removed or renamed (not when a file in it is written). The time of change is among it
/// since no program can set that back.
struct FileStamp {
  uint64_t inode = 0;
  uint64_t size = 0;
  int64_t modified_ns = 0;
  int64_t changed_ns = 0;

  bool operator==(const FileStamp&) const = default;
};

/// Links are followed. All 0 where there is no such file.
FileStamp stamp_of(const std::filesystem::path& path);
FileStamp stamp_of(const base::UniqueFd& file);

/// The same before the file is read: waits until its times are older than a file system's clock
/// ticks, so that a change after this call gives another stamp.
FileStamp settled_stamp_of(const std::filesystem::path& path);

}  // namespace syncbn::data::detail
