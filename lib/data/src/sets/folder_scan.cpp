#include "sets/folder_scan.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <map>
#include <memory>

#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

namespace syncbn::data::detail {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(const fs::path& folder, const std::string& why) {
  throw base::UserError(fmt::format("cannot read the image folder '{}': {}", folder.string(), why));
}

[[noreturn]] void fail_to_read(const fs::path& folder, int error) {
  base::throw_file_error(fmt::format("cannot read the image folder '{}'", folder.string()), error);
}

/// What a folder held just after it had this stamp.
struct Listing {
  FileStamp stamp;
  std::vector<std::string> folders;
  NameList images;
};

/// Links to folders count as folders.
bool is_folder(DIR* folder, const dirent& entry) {
  if (entry.d_type != DT_LNK && entry.d_type != DT_UNKNOWN) return entry.d_type == DT_DIR;
  struct stat status {};
  return ::fstatat(::dirfd(folder), entry.d_name, &status, 0) == 0 && S_ISDIR(status.st_mode);
}

/// Both sorted. Entries are told apart without a look at each file, of which there may be millions.
Listing list_folder(const fs::path& path) {
  Listing listing{.stamp = settled_stamp_of(path), .folders = {}, .images = {}};
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir(path.c_str()), &::closedir);
  if (!folder) fail_to_read(path, errno);
  errno = 0;
  while (const dirent* entry = ::readdir(folder.get())) {
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") {
      if (is_folder(folder.get(), *entry)) {
        listing.folders.emplace_back(name);
      } else if (has_image_extension(name)) {
        listing.images.add(name);
      }
    }
    errno = 0;
  }
  if (errno != 0) fail_to_read(path, errno);
  std::ranges::sort(listing.folders);
  listing.images.sort();
  return listing;
}

/// The folder root/name and all below, by name.
void list_all(const fs::path& root, const std::string& name,
              std::map<std::string, Listing>& listings) {
  const Listing& listing = listings[name] = list_folder(root / name);
  for (const std::string& below : listing.folders) {
    list_all(root, fmt::format("{}/{}", name, below), listings);
  }
}

void add_folder(std::string_view name, const Listing& listing, int64_t label,
                FolderIndexWriter& writer) {
  writer.begin_folder(name, listing.stamp, label);
  for (int64_t i = 0; i < listing.images.size(); ++i) writer.add_file(listing.images[i]);
}

uint64_t write_class_folders(const fs::path& root, IndexWriter& out) {
  FolderIndexWriter writer(out);
  const Listing top = list_folder(root);
  const auto& classes = top.folders;
  if (classes.empty()) fail(root, "it has no folders, of which each would be a class");
  writer.begin_folder("", top.stamp, /*label=*/-1);
  std::vector<std::string> empty;
  for (size_t label = 0; label < classes.size(); ++label) {
    std::map<std::string, Listing> listings;
    list_all(root, classes[label], listings);
    if (std::ranges::all_of(listings,
                            [](const auto& at) { return at.second.images.size() == 0; })) {
      empty.push_back(classes[label]);
    }
    for (const auto& [name, listing] : listings) {
      add_folder(name, listing, static_cast<int64_t>(label), writer);
    }
  }
  if (!empty.empty()) {
    fail(root, fmt::format("there are no images in {}; remove what is no class",
                           base::join(empty, ", ")));
  }
  return writer.finish(classes);
}

/// A name without its extension.
std::string_view stem_of(std::string_view name) {
  const size_t dot = name.rfind('.');
  return dot == 0 ? name : name.substr(0, dot);
}

/// The numbers of a list's names, sorted by stem.
std::vector<int64_t> by_stem(const NameList& names) {
  std::vector<int64_t> order(static_cast<size_t>(names.size()));
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i);
  std::ranges::stable_sort(order, {}, [&](int64_t i) { return stem_of(names[i]); });
  return order;
}

uint64_t write_pairs(const fs::path& images, const fs::path& masks, IndexWriter& out) {
  FolderIndexWriter writer(out);
  const Listing pictures = list_folder(images);
  const Listing labels = list_folder(masks);
  if (pictures.images.size() == 0) {
    throw base::UserError(
        fmt::format("segmentation_folder: there are no images in '{}'", images.string()));
  }
  add_folder("", pictures, /*label=*/-1, writer);
  writer.begin_folder("", labels.stamp, /*label=*/-1);
  const auto order = by_stem(labels.images);
  for (int64_t i = 0; i < pictures.images.size(); ++i) {
    const std::string_view stem = stem_of(pictures.images[i]);
    const auto mask = std::ranges::lower_bound(
        order, stem, {}, [&](int64_t at) { return stem_of(labels.images[at]); });
    if (mask == order.end() || stem_of(labels.images[*mask]) != stem) {
      throw base::UserError(fmt::format("segmentation_folder: '{}' has no mask in '{}'",
                                        (images / pictures.images[i]).string(), masks.string()));
    }
    writer.add_file(labels.images[*mask]);
  }
  return writer.finish({});
}

/// A folder by one name, however it is reached.
std::string real_name(const fs::path& folder) {
  std::error_code unreadable;
  const fs::path real = fs::canonical(folder, unreadable);
  if (unreadable) fail_to_read(folder, unreadable.value());
  return real.string();
}

}  // namespace

std::vector<std::string> class_names(const fs::path& root) {
  return list_folder(root).folders;
}

bool has_image_extension(std::string_view name) {
  constexpr std::array<std::string_view, 9> kExtensions = {".jpg", ".jpeg", ".png",  ".ppm", ".bmp",
                                                           ".pgm", ".tif",  ".tiff", ".webp"};
  return std::ranges::any_of(kExtensions, [&](std::string_view extension) {
    if (name.size() < extension.size()) return false;
    return std::ranges::equal(name.substr(name.size() - extension.size()), extension,
                              [](unsigned char c, char lower) { return std::tolower(c) == lower; });
  });
}

FolderIndex index_class_folders(const fs::path& root, const IndexCacheOptions& cache) {
  const auto path_of = [&](size_t, std::string_view name) { return root / name; };
  return FolderIndex(open_index(
      {.name = root.string(),
       .key = "image_folder " + real_name(root),
       .is_current =
           [&](const MappedIndex& index) { return folders_are_unchanged(index, path_of); },
       .build = [&](IndexWriter& out) { return write_class_folders(root, out); }},
      cache));
}

FolderIndex index_pairs(const fs::path& images, const fs::path& masks,
                        const IndexCacheOptions& cache) {
  const auto path_of = [&](size_t folder, std::string_view) {
    return folder == 0 ? images : masks;
  };
  return FolderIndex(open_index(
      {.name = images.string(),
       .key = fmt::format("segmentation_folder {} {}", real_name(images), real_name(masks)),
       .is_current =
           [&](const MappedIndex& index) { return folders_are_unchanged(index, path_of); },
       .build = [&](IndexWriter& out) { return write_pairs(images, masks, out); }},
      cache));
}

}  // namespace syncbn::data::detail
