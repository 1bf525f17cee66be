#pragma once

#include <cstdint>
#include <filesystem>

#include <syncbn/base/unique_fd.h>

namespace syncbn::data::detail {

/// Detects changes of a file or folder. A folder's stamp changes when an entry is added, removed or
/// renamed, not when a file in it is written. It includes the time of change (st_ctim), since no
/// program can set that back.
struct FileStamp {
  uint64_t inode = 0;
  uint64_t size = 0;
  int64_t modified_ns = 0;
  int64_t changed_ns = 0;

  bool operator==(const FileStamp&) const = default;
};

/// Follows links. All 0 if there is no such file.
FileStamp stamp_of(const std::filesystem::path& path);
FileStamp stamp_of(const base::UniqueFd& file);

/// Call this before reading the file: waits until its times are older than a tick of the file
/// system's clock, so that any later change gives another stamp.
FileStamp settled_stamp_of(const std::filesystem::path& path);

}  // namespace syncbn::data::detail
