#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <string>

#include "index/index_file.h"

namespace syncbn::data::detail {

/// The data that an index describes, and how to build it.
struct IndexSource {
  std::string name;  ///< for messages
  /// Unique on this host: "image_folder /data/train".
  std::string key;
  /// Whether the data have not changed since the index was built.
  std::function<bool(const MappedIndex&)> is_current;
  /// Writes all sections except kKeySection and returns the fingerprint. @throws base::UserError
  /// for data that cannot be indexed.
  std::function<uint64_t(IndexWriter&)> build;
};

struct IndexCacheOptions {
  /// Folder of the index files; empty: $XDG_CACHE_HOME/syncbn, or ~/.cache/syncbn.
  std::filesystem::path folder = {};
  /// How long to wait for another process that builds the same index.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  /// How long the other ranks of a host wait for its first rank (LOCAL_RANK 0) to begin, so that
  /// usually the rank that logs also builds.
  std::chrono::milliseconds head_start = std::chrono::seconds(2);
};

/// Maps the index file of `source`, building it first if it is not current. One process of a host
/// builds; the others wait and share its memory. If no file can be written, each process builds the
/// index in its own memory, and LOCAL_RANK 0 logs a warning.
/// @throws any exception of `build`; base::UnavailableError after the timeout.
MappedIndex open_index(const IndexSource& source, const IndexCacheOptions& options);

}  // namespace syncbn::data::detail
