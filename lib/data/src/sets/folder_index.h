#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <syncbn/base/hash.h>

#include "index/file_stamp.h"
#include "index/index_file.h"
#include "index/name_list.h"

namespace syncbn::data::detail {

/// Which files are where: names by folder, some four bytes a file besides its name and its label.
class FolderIndex {
 public:
  /// A folder's part of the files. Its name is relative to the data set's, or empty.
  struct Folder {
    uint64_t first_file;
    uint64_t first_byte;  ///< of its files' names, which lie one behind the other
    int64_t label;
  };

  explicit FolderIndex(MappedIndex index);

  int64_t size() const { return std::ssize(ends_); }
  /// "cat/3.jpg"; thread-safe, as all here.
  std::string file(int64_t index) const;
  /// Empty where there are no classes.
  std::span<const int64_t> labels() const { return labels_; }
  std::vector<std::string> classes() const;
  /// A hash of all names.
  uint64_t fingerprint() const { return index_.fingerprint(); }

 private:
  MappedIndex index_;
  std::span<const Folder> folders_;
  std::string_view names_;
  std::span<const uint32_t> ends_;
  std::span<const int64_t> labels_;
};

/// Writes a FolderIndex: folders in order, each folder's files behind it.
class FolderIndexWriter {
 public:
  explicit FolderIndexWriter(IndexWriter& out);

  /// `stamp`: of the folder before its files were read.
  void begin_folder(std::string_view name, const FileStamp& stamp, int64_t label);
  void add_file(std::string_view name);
  /// The names' fingerprint. Without classes files have no labels.
  uint64_t finish(const std::vector<std::string>& classes);

 private:
  void write_labels();

  IndexWriter& out_;
  base::Fnv1a hash_;
  NameList folder_names_;
  std::vector<FileStamp> stamps_;
  std::vector<FolderIndex::Folder> folders_;
  std::vector<uint32_t> ends_;
  uint64_t bytes_ = 0;
};

/// Whether the folders are what they were when the index was written. `path_of` takes a folder's
/// number and name.
bool folders_are_unchanged(
    const MappedIndex& index,
    const std::function<std::filesystem::path(size_t, std::string_view)>& path_of);

}  // namespace syncbn::data::detail
