#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <syncbn/base/hash.h>

#include "index/index_cache.h"
#include "sets/file_bytes.h"

namespace syncbn::data::detail {

/// A list of strings in one buffer: 8 bytes per name in addition to its characters.
class NameList {
 public:
  /// @throws base::UserError if all names together exceed 4 GB.
  void add(std::string_view name);

  std::string_view operator[](int64_t index) const {
    return text_of(entries_[static_cast<size_t>(index)]);
  }
  int64_t size() const { return std::ssize(entries_); }

  void sort() {
    std::ranges::sort(entries_, {}, [this](const Entry& entry) { return text_of(entry); });
  }

 private:
  struct Entry {
    uint32_t begin;
    uint32_t size;
  };

  std::string_view text_of(const Entry& entry) const {
    return std::string_view(bytes_).substr(entry.begin, entry.size);
  }

  std::string bytes_;
  std::vector<Entry> entries_;
};

/// The files of a data set by folder: about 4 bytes per file in addition to its name and label.
/// Thread-safe.
class FolderIndex {
 public:
  struct Folder {
    uint64_t first_file;
    uint64_t first_byte;  ///< of its files' names
    int64_t label;
  };

  /// Whether the arrays of an index are consistent. Checksums do not protect against a forged file.
  static bool is_sound(const MappedIndex& index, bool has_classes);
  /// @pre is_sound()
  explicit FolderIndex(MappedIndex index);

  int64_t size() const { return std::ssize(ends_); }
  /// The path below the data set's folder: "cat/3.jpg".
  std::string file(int64_t index) const;
  /// Empty if there are no classes.
  std::span<const int64_t> labels() const { return labels_; }
  std::vector<std::string> classes() const;
  /// The files that were empty or missing (dangling links) when the index was built, or whose
  /// content was not that of JPEG or PNG though their names left it open.
  std::span<const uint64_t> unreadable() const;
  /// FileCounts::text() of the images that are not among the files, those beside class folders
  /// included, and of links to nothing, which may have led to a folder.
  std::string left_out() const;
  /// A hash of all paths and the first 64 KiB of the first file: two folders may have files of the
  /// same names.
  uint64_t fingerprint() const { return index_.fingerprint(); }

 private:
  MappedIndex index_;
  std::span<const Folder> folders_;
  std::string_view names_;
  std::span<const uint32_t> ends_;
  std::span<const int64_t> labels_;
};

/// Writes a FolderIndex: each folder, followed by its files.
class FolderIndexWriter {
 public:
  explicit FolderIndexWriter(IndexWriter& out);

  /// @param stamp of the folder before its entries were listed.
  void begin_folder(std::string_view name, const FileStamp& stamp, int64_t label);
  void add_file(std::string_view name, bool is_unreadable);
  /// Counts an image or link that is not among the files.
  void leave_out(const std::string& name, const std::string& kind = "") {
    left_out_.add(name, kind);
  }
  std::string left_out() const { return left_out_.text(); }
  /// Adds to the fingerprint. To be called after all files were added.
  void add_content_of_first_file(const std::filesystem::path& root);
  /// Returns the fingerprint. Without classes, files have no labels.
  uint64_t finish(const std::vector<std::string>& classes);

 private:
  IndexWriter& out_;
  base::Fnv1a hash_;
  std::filesystem::path first_file_;  ///< relative to the data set's folder
  NameList folder_names_;
  std::vector<FileStamp> stamps_;
  std::vector<FolderIndex::Folder> folders_;
  std::vector<uint32_t> ends_;
  std::vector<uint64_t> unreadable_;
  FileCounts left_out_;
  uint64_t bytes_ = 0;
};

/// Whether a file is empty or missing.
bool is_empty_file(const std::filesystem::path& file);

/// Dataset::remarks() on the files of an index: those that are left out, and those that still
/// cannot be read. Looks into files: call it once.
/// @param where "image_folder: 'train'"
/// @param path_of takes a file's number
std::vector<Remark> remarks_on(const FolderIndex& index, const std::string& where,
                               const std::function<std::filesystem::path(int64_t)>& path_of);

/// The JPEG and PNG files in and below a folder, by extension or content, relative to it and
/// sorted.
/// @param others counts the images of other formats
std::vector<std::filesystem::path> images_below(const std::filesystem::path& root,
                                                FileCounts& others);

/// The names of the folders in a folder, sorted.
std::vector<std::string> class_names(const std::filesystem::path& root);

/// The image files below a folder of class folders, in the order of torchvision's ImageFolder:
/// classes by name, the folders of a class by path, the files of a folder by name. Files with other
/// extensions belong to them if their content is that of JPEG or PNG.
/// @param classes whose positions are the labels; they must hold the names of all class folders,
///   and may have no folder or no image. Empty: the folders, each with an image.
/// @throws base::UserError naming the folder if it has no class folders, or the classes without an
///   image (with `classes`, if none has one).
FolderIndex index_class_folders(const std::filesystem::path& root, const IndexCacheOptions& cache,
                                const std::vector<std::string>& classes = {});

/// The n images of a folder, sorted, as files 0 to n - 1, and their masks (files of the same name
/// except for the extension) as files n to 2n - 1.
/// @throws base::UserError naming the folder without images, or the first images without a mask.
FolderIndex index_pairs(const std::filesystem::path& images, const std::filesystem::path& masks,
                        const IndexCacheOptions& cache);

}  // namespace syncbn::data::detail
