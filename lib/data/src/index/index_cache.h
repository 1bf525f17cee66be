#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <string>

#include "index/index_file.h"

namespace syncbn::data::detail {

/// What an index is of, and how it is made.
struct IndexSource {
  std::string name;  ///< for messages
  /// "image_folder /data/train": another one of this host has another key.
  std::string key;
  /// Whether the data are still those that the index was made of.
  std::function<bool(const MappedIndex&)> is_current;
  /// Writes all sections but kKeySection; the fingerprint. @throws base::UserError for data that
  /// cannot be indexed.
  std::function<uint64_t(IndexWriter&)> build;
};

struct IndexCacheOptions {
  /// Where index files are kept; empty: $XDG_CACHE_HOME/syncbn, or ~/.cache/syncbn.
  std::filesystem::path folder = {};
  /// How long to wait for a process that builds the same index.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  /// How long other ranks of a host leave it to its first (LOCAL_RANK 0), which then has the say
  /// about it in the logs.
  std::chrono::milliseconds head_start = std::chrono::seconds(2);
};

/// The index of `source`: its file if it is current, or a new one. One process of a host builds it,
/// the others wait for it and share its memory. Where no file can be written it is built in this
/// process's memory, which rank 0 of the host says.
/// @throws what `build` throws; base::UnavailableError after the timeout.
MappedIndex open_index(const IndexSource& source, const IndexCacheOptions& options);

}  // namespace syncbn::data::detail
