#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "index/file_stamp.h"
#include "index/index_cache.h"

namespace syncbn::data::detail {

/// Where the samples of tar shards are, in the shards' order.
class ShardIndex {
 public:
  /// Where a sample's image is.
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

  explicit ShardIndex(MappedIndex index);

  int64_t size() const { return std::ssize(places_); }
  const Place& operator[](int64_t index) const { return places_[static_cast<size_t>(index)]; }
  std::span<const int64_t> labels() const { return labels_; }
  /// The first sample behind each shard's own.
  std::span<const int64_t> shard_ends() const { return shard_ends_; }
  /// Of each shard, when it was indexed.
  std::span<const FileStamp> stamps() const;
  /// Where these samples are, those that follow each other as one.
  std::vector<Range> ranges(std::span<const int64_t> samples) const;
  /// A hash of all places and labels.
  uint64_t fingerprint() const { return index_.fingerprint(); }

 private:
  MappedIndex index_;
  std::span<const Place> places_;
  std::span<const int64_t> labels_;
  std::span<const int64_t> shard_ends_;
};

/// Labels are to be below `classes`. `pattern`: what the user calls the shards, for messages.
/// @throws base::UserError naming shard and member for what is no sample, and for a damaged shard;
///   when there is no sample.
ShardIndex index_shards(const std::vector<std::filesystem::path>& shards, int64_t classes,
                        const std::string& pattern, const IndexCacheOptions& cache);

}  // namespace syncbn::data::detail
