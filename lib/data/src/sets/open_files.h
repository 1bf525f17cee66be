#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <vector>

#include <syncbn/base/unique_fd.h>

#include "index/file_stamp.h"

namespace syncbn::data::detail {

/// Files that are read from here and there, a few of them open at a time: a process may not open as
/// many as a data set can have. Thread-safe.
class OpenFiles {
 public:
  using File = std::shared_ptr<const base::UniqueFd>;

  struct Named {
    std::filesystem::path path;
    FileStamp stamp;  ///< when it was indexed
  };

  /// Those that were used last stay open, `most_open` of them.
  explicit OpenFiles(std::vector<Named> files, size_t most_open = 128);

  const std::filesystem::path& path(size_t number) const { return files_[number].path; }

  /// It stays open while somebody holds it.
  /// @throws base::UserError naming the file when it cannot be read, or was written to or replaced
  ///   since it was indexed.
  File open(size_t number) const;

 private:
  struct Opened {
    size_t number;
    File file;
  };

  /// Moves it to the front; nothing where it is not open.
  File find(size_t number) const;

  const std::vector<Named> files_;
  const size_t most_open_;
  mutable std::mutex mutex_;
  mutable std::vector<Opened> opened_;  ///< the one that was used last in front
};

}  // namespace syncbn::data::detail
