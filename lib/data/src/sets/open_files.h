#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <vector>

#include <syncbn/base/unique_fd.h>

#include "index/file_stamp.h"

namespace syncbn::data::detail {

/// Opens files on demand and keeps a limited number of them open, since a data set may have more
/// files than a process may open. Thread-safe.
class OpenFiles {
 public:
  using File = std::shared_ptr<const base::UniqueFd>;

  struct Named {
    std::filesystem::path path;
    FileStamp stamp;  ///< of the indexed file
  };

  /// @param max_open of the files, the most recently used ones stay open.
  explicit OpenFiles(std::vector<Named> files, size_t max_open = 128);

  const std::filesystem::path& path(size_t number) const { return files_[number].path; }

  /// The file stays open at least as long as the result exists.
  /// @throws base::UserError naming the file if it cannot be read, or was written to or replaced
  ///   since it was indexed.
  File open(size_t number) const;

 private:
  struct Opened {
    size_t number;
    File file;
  };

  /// Moves an open file to the front; null if it is not open.
  File find(size_t number) const;

  const std::vector<Named> files_;
  const size_t max_open_;
  mutable std::mutex mutex_;
  mutable std::vector<Opened> opened_;  ///< the most recently used one first
};

}  // namespace syncbn::data::detail
