#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include <syncbn/base/error.h>
#include <syncbn/base/unique_fd.h>

namespace syncbn::data::detail {

/// An index file is a header and a few arrays, its sections, which are mapped and read where they
/// lie: all processes of a host share its memory. Numbers are this machine's, and the header says
/// so.
constexpr size_t kMostSections = 16;

/// Section 0 is what the index is of (IndexSource::key); the others are its maker's.
constexpr size_t kKeySection = 0;

struct IndexHeader {
  struct Section {
    uint64_t offset = 0;
    uint64_t size = 0;  ///< in bytes
  };
  std::array<char, 8> magic = {'S', 'Y', 'N', 'C', 'B', 'N', 'I', 'X'};
  uint32_t version = 1;
  uint32_t byte_order = 0x01020304;
  uint64_t file_size = 0;
  uint64_t fingerprint = 0;
  std::array<Section, kMostSections> sections = {};
  uint32_t body_checksum = 0;    ///< CRC-32 of all behind the header
  uint32_t header_checksum = 0;  ///< and of all of the header before this
};

/// The file of an index cannot be written, read or mapped; not an error of the data.
class IndexFileError : public base::UnavailableError {
 public:
  using base::UnavailableError::UnavailableError;
};

/// Writes an index file from front to end, one section after the other.
///
///     IndexWriter writer(fd);
///     writer.begin(kLabels);
///     writer.add(std::span<const int64_t>(labels));
///     writer.finish(fingerprint);
class IndexWriter {
 public:
  /// Into an empty file, which must outlive the writer.
  explicit IndexWriter(const base::UniqueFd& file);

  /// Begins a section, and ends the one before; each comes once.
  void begin(size_t section);

  /// @throws IndexFileError when the disk is full or fails.
  void add_bytes(std::string_view bytes);

  template <class T>
  void add(std::span<const T> values) {
    static_assert(std::is_trivially_copyable_v<T>);
    add_bytes({reinterpret_cast<const char*>(values.data()), values.size_bytes()});
  }

  /// `fingerprint`: of the data set whose index it is.
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

/// An index file in memory. Immutable: any thread may read it.
class MappedIndex {
 public:
  /// Nothing when the file is no index of this version and machine, was cut short or is damaged:
  /// every byte is looked at once. @throws IndexFileError where files cannot be mapped.
  static std::optional<MappedIndex> open(const base::UniqueFd& file);

  MappedIndex(MappedIndex&& other) noexcept;
  MappedIndex& operator=(MappedIndex&& other) noexcept;
  MappedIndex(const MappedIndex&) = delete;
  MappedIndex& operator=(const MappedIndex&) = delete;
  ~MappedIndex();

  std::string_view text(size_t section) const;

  template <class T>
  std::span<const T> array(size_t section) const {
    static_assert(std::is_trivially_copyable_v<T>);
    const std::string_view bytes = text(section);
    return {reinterpret_cast<const T*>(bytes.data()), bytes.size() / sizeof(T)};
  }

  uint64_t fingerprint() const { return header().fingerprint; }
  size_t size() const { return bytes_.size(); }

 private:
  explicit MappedIndex(std::span<const std::byte> bytes) : bytes_(bytes) {}
  const IndexHeader& header() const { return *reinterpret_cast<const IndexHeader*>(bytes_.data()); }

  std::span<const std::byte> bytes_;
};

}  // namespace syncbn::data::detail
