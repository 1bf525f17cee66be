#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>

namespace syncbn::models::detail {

/// The entries of a zip archive written by torch.save, or packed again: stored or deflated.
class ZipArchive {
 public:
  /// Whether `bytes` begin like an archive.
  static bool begins(std::string_view bytes);

  /// @param bytes of the whole archive; must outlive this.
  /// @throws base::UserError for a damaged table of contents.
  explicit ZipArchive(std::string_view bytes);

  /// Whether there is an entry of this name, relative to the archive's only folder ("data.pkl").
  bool has(const std::string& name) const { return entries_.contains(name); }

  /// The content of an entry, which must not outlive this.
  /// @throws base::UserError if there is none, it is compressed by another method than deflate, or
  ///   its checksum is wrong.
  std::string_view read(const std::string& name) const;

 private:
  struct Entry {
    std::string_view stored;
    uint64_t size = 0;  ///< of the content after decompression
    uint32_t crc = 0;
    uint16_t method = 0;
    mutable std::unique_ptr<char[]> inflated = {};  ///< content of a compressed entry that was read
  };
  void add(std::string_view header);

  std::string_view bytes_;
  std::map<std::string, Entry> entries_;
  size_t content_bytes_ = 0;  ///< of all entries
};

}  // namespace syncbn::models::detail
