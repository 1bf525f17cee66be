#pragma once

#include <sys/mman.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <syncbn/base/error.h>
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

/// Call this before reading the file. Waits until the file's times are older than the resolution of
/// the file system's clock, so that any later change gives another stamp.
FileStamp settled_stamp_of(const std::filesystem::path& path);

// An index file is a header and a few arrays, the sections. All processes of a host map it and
// share its memory. Numbers are in this machine's byte order, which the header records.

constexpr size_t kMaxSections = 16;

/// The section with IndexSource::key. IndexSource::build defines the others.
constexpr size_t kKeySection = 0;

struct IndexHeader {
  struct Section {
    uint64_t offset = 0;
    uint64_t size = 0;  ///< in bytes
  };
  std::array<char, 8> magic = {'S', 'Y', 'N', 'C', 'B', 'N', 'I', 'X'};
  uint32_t version = 6;
  uint32_t byte_order = 0x01020304;
  uint64_t file_size = 0;
  uint64_t fingerprint = 0;
  std::array<Section, kMaxSections> sections = {};
  uint32_t body_checksum = 0;    ///< CRC-32 of everything after the header
  uint32_t header_checksum = 0;  ///< CRC-32 of the header up to here
};

/// An index file cannot be written, read or mapped. Errors in the data throw other exceptions.
class IndexFileError : public base::UnavailableError {
 public:
  using base::UnavailableError::UnavailableError;
};

/// Writes an index file sequentially.
///
///     IndexWriter writer(fd);
///     writer.begin(kLabels);
///     writer.add(std::span<const int64_t>(labels));
///     writer.finish(fingerprint);
class IndexWriter {
 public:
  /// @param file empty; it must outlive the writer.
  explicit IndexWriter(const base::UniqueFd& file);

  /// Begins a section and ends the previous one. Each section can be written once.
  void begin(size_t section);

  /// @throws IndexFileError if the disk is full or fails.
  void add_bytes(std::string_view bytes);

  template <class T>
  void add(std::span<const T> values) {
    static_assert(std::is_trivially_copyable_v<T>);
    add_bytes({reinterpret_cast<const char*>(values.data()), values.size_bytes()});
  }

  template <class T>
  void add_section(size_t section, const std::vector<T>& values) {
    begin(section);
    add(std::span<const T>(values));
  }

  /// @param fingerprint of the data set.
  void finish(uint64_t fingerprint);

 private:
  void end_section();
  void flush();

  const base::UniqueFd& file_;
  IndexHeader header_;
  std::string buffer_;
  uint64_t at_ = sizeof(IndexHeader);
  std::optional<size_t> section_;
};

/// Unmaps a file's content.
struct Unmap {
  size_t size = 0;
  void operator()(char* bytes) const { ::munmap(bytes, size); }
};
using MappedBytes = std::unique_ptr<char, Unmap>;

/// A mapped index file. Move-only; immutable, so any thread may read it.
class MappedIndex {
 public:
  /// Nothing if the file is truncated, damaged (every byte is checked), or not an index of this
  /// version and byte order. @throws IndexFileError if it cannot be mapped.
  static std::optional<MappedIndex> open(const base::UniqueFd& file);

  std::string_view text(size_t section) const {
    const auto& [offset, size] = header().sections.at(section);
    return {bytes_.get() + offset, size};
  }

  template <class T>
  std::span<const T> array(size_t section) const {
    static_assert(std::is_trivially_copyable_v<T>);
    const std::string_view bytes = text(section);
    return {reinterpret_cast<const T*>(bytes.data()), bytes.size() / sizeof(T)};
  }

  uint64_t fingerprint() const { return header().fingerprint; }

 private:
  explicit MappedIndex(MappedBytes bytes) : bytes_(std::move(bytes)) {}
  const IndexHeader& header() const { return *reinterpret_cast<const IndexHeader*>(bytes_.get()); }

  MappedBytes bytes_;
};

}  // namespace syncbn::data::detail
