#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <syncbn/base/unique_fd.h>
#include <syncbn/data/dataset.h>

#include "index/index_file.h"

namespace syncbn::data::detail {

/// @throws base::UserError always, naming the file
[[noreturn]] void refuse_file(const std::filesystem::path& path, const std::string& why);

/// Names all missing files at once: "WHAT for 2 of ALL: a.png, b.png; ADVICE".
/// @param all such as "12 images in 'photos'"
/// @throws base::UserError unless `missing` is empty
void refuse_missing(const std::string& what, const std::vector<std::string>& missing,
                    const std::string& all, const std::string& advice);

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
/// @throws base::UserError naming the file if it is missing, unreadable, damaged, truncated, longer
///   than `max_bytes` after decompression, or a base::foreign_file().
std::string read_gzip_file(const std::filesystem::path& path, size_t max_bytes);

/// A whole number as tools write it: pandas 1.0 for 1, spreadsheets "1" and a byte order mark,
/// label tools true.
std::optional<int64_t> whole_number(std::string_view text);
std::optional<int64_t> whole_number(double value);

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

/// What the part of a file's name after the last dot says.
enum class NameKind {
  kNoImage,
  kOtherImage,
  kTorchvisionImage,  ///< a sample for torchvision's ImageFolder, of a format that is not decoded
  kDecoded,           ///< JPEG and PNG, which torchvision takes as well
};
NameKind kind_of(std::string_view name);

/// The first bytes of a file with which is_jpeg() and is_png() decide.
constexpr int64_t kMagicBytes = 8;

/// Whether a regular file begins as a JPEG or PNG file does. False if it cannot be read.
bool has_image_content(const std::filesystem::path& file);

/// Counts files by extension.
class FileCounts {
 public:
  /// @param kind such as kEmptyFile; "": the name's extension
  void add(const std::string& name, const std::string& kind = "");
  int64_t count() const { return count_; }
  /// "4 files (1 .gif, 2 .heic, 1 empty), such as 'a.gif'", the first by name; "" without files.
  std::string text() const;

 private:
  int64_t count_ = 0;
  std::map<std::string, int64_t> kinds_;
  std::string first_;
};

/// Adds "WHAT: ITEMS: WHY" to the remarks, unless `items` is empty.
/// @param what such as "image_folder: 'train': left out"
/// @param items such as FileCounts::text()
void add_remark(std::vector<Remark>& remarks, std::string_view what, const std::string& items,
                std::string_view why);

/// The remark on samples that cannot be read.
std::vector<Remark> unreadable_remark(const UnreadableFiles& files);

}  // namespace syncbn::data::detail
