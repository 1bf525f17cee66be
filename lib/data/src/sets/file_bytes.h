#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <syncbn/base/unique_fd.h>

#include "index/index_file.h"

namespace syncbn::data::detail {

int64_t size_of_file(const base::UniqueFd& file, const std::filesystem::path& path);

/// Reads `size` bytes at `offset` into `bytes`.
/// @throws base::UserError if the file ends too early, UnavailableError if the disk fails.
void read_at(const base::UniqueFd& file, const std::filesystem::path& path, int64_t offset,
             int64_t size, std::vector<uint8_t>& bytes);

/// Asks the system to read a part of a file into its cache, without waiting for it.
void read_ahead(const base::UniqueFd& file, int64_t offset, int64_t size);

/// This thread's buffer, which saves an allocation for each sample.
std::vector<uint8_t>& thread_buffer();

/// The whole file, in thread_buffer().
std::span<const uint8_t> read_whole_file(const std::filesystem::path& path);

/// The uncompressed content of a gzip file; the plain content of any other file.
/// @throws base::UserError naming the file if it is missing, unreadable, damaged, truncated, or
///   longer than `max_bytes` after decompression.
std::string read_gzip_file(const std::filesystem::path& path, size_t max_bytes);

/// Opens files on demand and keeps a limited number of them open, because a data set may have more
/// files than a process may open. Thread-safe.
class OpenFiles {
 public:
  using File = std::shared_ptr<const base::UniqueFd>;

  struct Named {
    std::filesystem::path path;
    FileStamp stamp;  ///< of the indexed file
  };

  /// @param max_open this many files stay open, the most recently used ones.
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
  mutable std::vector<Opened> opened_;  ///< most recently used first
};

/// Whether `text` in lower case is `lower`.
bool equals_in_lower_case(std::string_view text, std::string_view lower);

/// Whether files with this extension are images that can be decoded.
bool is_decoded(std::string_view extension);

}  // namespace syncbn::data::detail
