#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "index/index_cache.h"

namespace syncbn::data::detail {

/// For messages about members that form no sample.
constexpr std::string_view kSampleRule =
    "the files of a sample are named alike up to the first dot and follow each other (tar "
    "--sort=name), with a .cls and a JPEG or PNG among them";

/// The positions of the samples in tar shards, in the order of the shards.
class ShardIndex {
 public:
  /// The position of a sample's image.
  struct Place {
    uint64_t offset;
    uint32_t size;
    uint32_t shard;
  };

  /// A part of a shard.
  struct Range {
    uint32_t shard;
    int64_t offset;
    int64_t size;
  };

  /// Whether the arrays of an index are consistent with each other, the sizes of the shards and
  /// `classes`. Checksums do not protect against a forged file.
  /// @pre its stamps are those of the shards
  static bool is_sound(const MappedIndex& index, int64_t classes);
  /// @pre is_sound()
  explicit ShardIndex(MappedIndex index);

  int64_t size() const { return std::ssize(places_); }
  const Place& operator[](int64_t index) const { return places_[static_cast<size_t>(index)]; }
  std::span<const int64_t> labels() const { return labels_; }
  /// Dataset::shard_ends()
  std::span<const int64_t> shard_ends() const { return shard_ends_; }
  /// The shards' stamps at the time of indexing.
  std::span<const FileStamp> stamps() const;
  /// The positions of these samples, with adjacent samples joined into one range.
  std::vector<Range> ranges(std::span<const int64_t> samples) const;
  /// FileCounts::text() of members that belong to no sample though they look like parts of one.
  std::string left_out() const;
  /// FileCounts::text() of the shards that end without a tar file's closing blocks.
  std::string unclosed() const;
  /// A hash of all places and labels.
  uint64_t fingerprint() const { return index_.fingerprint(); }

 private:
  MappedIndex index_;
  std::span<const Place> places_;
  std::span<const int64_t> labels_;
  std::span<const int64_t> shard_ends_;
};

/// A pattern with its braces expanded, as webdataset and shells do: "a-{08..10}.tar" is a-08.tar,
/// a-09.tar and a-10.tar, "{a,b}.tar" is a.tar and b.tar.
/// @throws base::UserError for unclosed braces or an invalid range.
std::vector<std::string> expand_braces(const std::string& pattern);

/// @param classes labels must be below this.
/// @param pattern the user's name for the shards, for messages.
/// @throws base::UserError naming shard and member for an incomplete sample or a damaged shard, or
///   if there is no sample.
ShardIndex index_shards(const std::vector<std::filesystem::path>& shards, int64_t classes,
                        const std::string& pattern, const IndexCacheOptions& cache);

}  // namespace syncbn::data::detail
