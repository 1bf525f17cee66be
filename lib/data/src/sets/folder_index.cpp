#include "sets/folder_index.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <cerrno>
#include <fstream>
#include <map>
#include <numeric>

#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/base/open_file.h>
#include <syncbn/base/text.h>

#include "sets/file_bytes.h"

namespace syncbn::data::detail {
namespace {

namespace fs = std::filesystem;

enum FolderSection : size_t {
  kFileNames = kKeySection + 1,
  kFileEnds,
  kLabels,
  kFolders,
  kFolderNames,
  kFolderNameEnds,
  kStamps,
  kClasses,
  kUnreadable,
  kLeftOut,
};

/// An element of a list of concatenated names.
std::string_view name_at(std::string_view names, std::span<const uint64_t> ends, size_t index) {
  const uint64_t begin = index == 0 ? 0 : ends[index - 1];
  return names.substr(begin, ends[index] - begin);
}

[[noreturn]] void fail(const fs::path& folder, const std::string& why) {
  throw base::UserError(fmt::format("cannot read the image folder '{}': {}", folder.string(), why));
}

[[noreturn]] void fail_to_read(const fs::path& folder, int error) {
  if (const std::string link = base::dangling_link(folder); !link.empty()) fail(folder, link);
  base::throw_file_error(fmt::format("cannot read the image folder '{}'", folder.string()), error);
}

struct Listing {
  FileStamp stamp;  ///< of the folder before it was listed
  std::vector<std::string> folders;
  std::vector<std::string> dangling;  ///< links to nothing, not with names of images
  std::vector<std::string> others;    ///< other images
  NameList images;
};

/// Whether a listed image cannot be decoded, as far as its name, size and first bytes show. Other
/// names were listed because of their first bytes.
bool is_unreadable(const fs::path& file) {
  const NameKind kind = kind_of(file.string());
  return kind == NameKind::kDecoded
             ? is_empty_file(file)
             : kind == NameKind::kTorchvisionImage && !has_image_content(file);
}

/// Lists a folder, sorted. Links to folders count as folders.
/// @param by_content opens files whose names do not show whether they are images
/// @throws base::UserError or UnavailableError naming an entry that cannot be looked up and may be
/// a
///   folder of images.
Listing list_folder(const fs::path& path, bool by_content = true) {
  Listing listing;
  listing.stamp = settled_stamp_of(path);
  std::error_code error;
  for (fs::directory_iterator entry(path, error), end; entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename();
    if (name.starts_with('.')) continue;  // such as macOS's ._1.jpg
    const NameKind kind = kind_of(name);
    std::error_code unreadable;
    if (entry->is_directory(unreadable)) {
      listing.folders.push_back(name);
    } else if (kind >= NameKind::kTorchvisionImage ||
               (by_content && has_image_content(entry->path()))) {
      listing.images.add(name);
    } else {
      // Links to nothing are accepted. Any other entry that cannot be looked up may be a folder.
      const bool is_missing = unreadable == std::errc::no_such_file_or_directory ||
                              unreadable == std::errc::not_a_directory ||
                              unreadable == std::errc::too_many_symbolic_link_levels;
      if (is_missing) {
        listing.dangling.push_back(name);
      } else if (unreadable) {
        base::throw_file_error(fmt::format("cannot read '{}'", entry->path().string()),
                               unreadable.value());
      } else if (kind == NameKind::kOtherImage) {
        listing.others.push_back(name);
      }
    }
  }
  if (error) fail_to_read(path, error.value());
  std::ranges::sort(listing.folders);
  listing.images.sort();
  return listing;
}

/// The canonical path: the same for all paths that lead to the folder.
std::string real_name(const fs::path& folder) {
  std::error_code unreadable;
  const fs::path real = fs::canonical(folder, unreadable);
  if (unreadable) fail_to_read(folder, unreadable.value());
  return real.string();
}

/// A folder, or one of those above it.
struct Entered {
  fs::path path;
  dev_t device = 0;
  ino_t inode = 0;
};

/// Adds a folder to those above it.
/// @throws base::UserError naming the folder if it is one of them, to which a link leads back: a
///   list of all files would not end. UserError or UnavailableError if it is unreadable.
void enter(const fs::path& folder, std::vector<Entered>& chain) {
  struct stat status {};
  if (::stat(folder.c_str(), &status) != 0) fail_to_read(folder, errno);
  const bool is_above = std::ranges::any_of(chain, [&](const Entered& above) {
    // Some file systems give the same number to several folders.
    return above.device == status.st_dev && above.inode == status.st_ino &&
           real_name(above.path) == real_name(folder);
  });
  if (is_above) fail(folder, "it is a link to a folder that contains it; remove the link");
  chain.push_back({.path = folder, .device = status.st_dev, .inode = status.st_ino});
}

/// Lists the folder root/name, or root itself if `name` is empty, and all folders below it.
/// @param chain the folders from root down to the one that holds it
void list_all(const fs::path& root, const std::string& name, std::vector<Entered>& chain,
              std::map<std::string, Listing>& listings) {
  const fs::path folder = name.empty() ? root : root / name;  // "root/" would follow a link
  enter(folder, chain);
  const Listing& listing = listings[name] = list_folder(folder);
  for (const std::string& below : listing.folders) {
    list_all(root, fs::path(name) / below, chain, listings);
  }
  chain.pop_back();
}

void add_folder(const fs::path& root, std::string_view name, const Listing& listing, int64_t label,
                FolderIndexWriter& writer) {
  writer.begin_folder(name, listing.stamp, label);
  for (int64_t i = 0; i < listing.images.size(); ++i) {
    writer.add_file(listing.images[i], is_unreadable(root / name / listing.images[i]));
  }
  for (const std::string& other : listing.others) {
    writer.leave_out((fs::path(name) / other).string());
  }
}

/// Records that there is nothing behind the links in a folder. If a disk is mounted there later,
/// the folder itself does not change.
void add_dangling(const fs::path& root, const fs::path& name, const Listing& listing,
                  FolderIndexWriter& writer) {
  for (const std::string& link : listing.dangling) {
    const std::string path = name / link;
    writer.begin_folder(path, FileStamp(), /*label=*/-1);
    std::error_code is_gone;
    writer.leave_out(path,
                     fmt::format("link to '{}'", fs::read_symlink(root / path, is_gone).string()));
  }
}

uint64_t write_class_folders(const fs::path& root, const std::vector<std::string>& wanted,
                             IndexWriter& out) {
  FolderIndexWriter writer(out);
  const Listing top = list_folder(root);
  const auto& classes = wanted.empty() ? top.folders : wanted;
  writer.begin_folder("", top.stamp, /*label=*/-1);
  for (int64_t i = 0; i < top.images.size(); ++i) writer.leave_out(std::string(top.images[i]));
  for (const std::string& other : top.others) writer.leave_out(other);
  add_dangling(root, "", top, writer);
  if (top.folders.empty()) {
    const std::string others = writer.left_out();
    fail(root,
         fmt::format("it has no folders; each class is a folder (of images of one class, name the "
                     "folder above){}",
                     others.empty() ? "" : "; left out: " + others));
  }
  std::vector<Entered> chain;
  enter(root, chain);
  std::vector<std::string> empty;
  for (const std::string& folder : top.folders) {
    if (!std::ranges::binary_search(classes, folder)) continue;  // made since the caller looked
    std::map<std::string, Listing> listings;
    list_all(root, folder, chain, listings);
    if (std::ranges::all_of(listings,
                            [](const auto& at) { return at.second.images.size() == 0; })) {
      empty.push_back(folder);
    }
    const int64_t label = std::ranges::lower_bound(classes, folder) - classes.begin();
    for (const auto& [name, listing] : listings) {
      add_folder(root, name, listing, label, writer);
      add_dangling(root, name, listing, writer);
    }
  }
  if (wanted.empty() ? !empty.empty() : empty.size() == top.folders.size()) {
    const std::string others = writer.left_out();
    fail(root, fmt::format("there are no images in {}; remove folders that are not classes{}",
                           base::join(empty, ", "),
                           others.empty() ? "" : "; neither JPEG nor PNG: " + others));
  }
  writer.add_content_of_first_file(root);
  return writer.finish(classes);
}

/// A name without its extension.
std::string_view stem_of(std::string_view name) {
  const size_t dot = name.rfind('.');
  return dot == 0 ? name : name.substr(0, dot);
}

uint64_t write_pairs(const fs::path& images, const fs::path& masks, IndexWriter& out) {
  FolderIndexWriter writer(out);
  const Listing pictures = list_folder(images);
  const Listing labels = list_folder(masks);
  if (pictures.images.size() == 0) {
    const bool has_folders = !pictures.folders.empty();
    throw base::UserError(fmt::format(
        "segmentation_folder: there are no images in '{}'{}", images.string(),
        has_folders ? "; its folders are not looked into: " + base::join(pictures.folders, ", ")
                    : ""));
  }
  add_folder(images, "", pictures, /*label=*/-1, writer);
  writer.begin_folder("", labels.stamp, /*label=*/-1);
  std::vector<int64_t> order(static_cast<size_t>(labels.images.size()));  // by stem
  std::iota(order.begin(), order.end(), 0);
  const auto stem_at = [&](int64_t i) { return stem_of(labels.images[i]); };
  std::ranges::stable_sort(order, {}, stem_at);
  std::vector<std::string> missing;
  for (int64_t i = 0; i < pictures.images.size(); ++i) {
    const std::string_view stem = stem_of(pictures.images[i]);
    const auto mask = std::ranges::lower_bound(order, stem, {}, stem_at);
    if (mask == order.end() || stem_at(*mask) != stem) {
      missing.push_back(base::printable(pictures.images[i]));
    } else {
      const std::string_view name = labels.images[*mask];
      writer.add_file(name, is_unreadable(masks / name));
    }
  }
  refuse_missing(
      fmt::format("segmentation_folder: no mask in '{}', a PNG of the same name,", masks.string()),
      missing,
      fmt::format("{} in '{}'", base::counted(pictures.images.size(), "image"), images.string()),
      "add the masks, or remove the images");
  writer.add_content_of_first_file(images);
  return writer.finish({});
}

/// Makes an IndexSource::is_current.
/// @param path_of takes a folder's number and name; it must outlive the result.
template <class PathOf>
auto is_current(bool has_classes, const PathOf& path_of) {
  return [has_classes, &path_of](const MappedIndex& index) {
    if (!FolderIndex::is_sound(index, has_classes)) return false;
    const auto stamps = index.array<FileStamp>(kStamps);
    const auto ends = index.array<uint64_t>(kFolderNameEnds);
    for (size_t i = 0; i < stamps.size(); ++i) {
      const std::string_view name = name_at(index.text(kFolderNames), ends, i);
      if (stamp_of(path_of(i, name)) != stamps[i]) return false;
    }
    return true;
  };
}

}  // namespace

void NameList::add(std::string_view name) {
  const size_t begin = bytes_.size();
  if (begin + name.size() > UINT32_MAX) {
    throw base::UserError(
        "the names in a folder have more than 4 GB together; put the files into several folders");
  }
  bytes_ += name;
  entries_.push_back({static_cast<uint32_t>(begin), static_cast<uint32_t>(name.size())});
}

bool FolderIndex::is_sound(const MappedIndex& index, bool has_classes) {
  const auto folders = index.array<Folder>(kFolders);
  const auto ends = index.array<uint32_t>(kFileEnds);
  const auto labels = index.array<int64_t>(kLabels);
  const auto name_ends = index.array<uint64_t>(kFolderNameEnds);
  const std::string_view classes = index.text(kClasses);
  const auto is_label = [count = std::ranges::count(classes, '\0')](int64_t label) {
    return label >= 0 && label < count;
  };
  if (folders.empty() || folders[0].first_file != 0 || name_ends.size() != folders.size() ||
      index.array<FileStamp>(kStamps).size() != folders.size() ||
      !std::ranges::is_sorted(name_ends) || name_ends.back() != index.text(kFolderNames).size() ||
      (!has_classes && (folders.size() != 2 || 2 * folders[1].first_file != ends.size())) ||
      has_classes != classes.ends_with('\0') || labels.size() != (has_classes ? ends.size() : 0) ||
      !std::ranges::all_of(labels, is_label) ||
      std::ranges::any_of(index.array<uint64_t>(kUnreadable),
                          [&](uint64_t file) { return file >= ends.size(); })) {
    return false;
  }
  uint64_t byte = 0;
  for (size_t i = 0; i < folders.size(); ++i) {
    const uint64_t first = folders[i].first_file;
    const uint64_t last = i + 1 < folders.size() ? folders[i + 1].first_file : ends.size();
    if (folders[i].first_byte != byte || first > last || last > ends.size()) return false;
    const auto files = ends.subspan(first, last - first);
    if (!std::ranges::is_sorted(files)) return false;
    if (!files.empty()) byte += files.back();
  }
  return byte == index.text(kFileNames).size();
}

FolderIndex::FolderIndex(MappedIndex index)
    : index_(std::move(index)),
      folders_(index_.array<Folder>(kFolders)),
      names_(index_.text(kFileNames)),
      ends_(index_.array<uint32_t>(kFileEnds)),
      labels_(index_.array<int64_t>(kLabels)) {}

std::string FolderIndex::file(int64_t index) const {
  const auto at = static_cast<uint64_t>(index);
  const auto next = std::ranges::upper_bound(folders_, at, {}, &Folder::first_file);
  const auto folder = static_cast<size_t>(next - folders_.begin() - 1);
  const auto& [first_file, first_byte, label] = folders_[folder];
  const uint32_t begin = at == first_file ? 0 : ends_[at - 1];
  const auto folder_name =
      name_at(index_.text(kFolderNames), index_.array<uint64_t>(kFolderNameEnds), folder);
  return fmt::format("{}{}{}", folder_name, folder_name.empty() ? "" : "/",
                     names_.substr(first_byte + begin, ends_[at] - begin));
}

std::vector<std::string> FolderIndex::classes() const {
  std::vector<std::string> names;
  for (std::string_view all = index_.text(kClasses); !all.empty();) {
    names.emplace_back(all.substr(0, all.find('\0')));
    all.remove_prefix(names.back().size() + 1);
  }
  return names;
}

std::span<const uint64_t> FolderIndex::unreadable() const {
  return index_.array<uint64_t>(kUnreadable);
}

std::string FolderIndex::left_out() const {
  return std::string(index_.text(kLeftOut));
}

FolderIndexWriter::FolderIndexWriter(IndexWriter& out) : out_(out) {
  out_.begin(kFileNames);
}

void FolderIndexWriter::begin_folder(std::string_view name, const FileStamp& stamp, int64_t label) {
  folder_names_.add(name);
  stamps_.push_back(stamp);
  folders_.push_back({.first_file = ends_.size(), .first_byte = bytes_, .label = label});
}

void FolderIndexWriter::add_file(std::string_view name, bool is_unreadable) {
  if (is_unreadable) unreadable_.push_back(ends_.size());
  const FolderIndex::Folder& folder = folders_.back();
  out_.add_bytes(name);
  bytes_ += name.size();
  // Fits into 32 bits: a NameList held the names of this folder.
  ends_.push_back(static_cast<uint32_t>(bytes_ - folder.first_byte));
  const std::string_view folder_name = folder_names_[std::ssize(folders_) - 1];
  if (first_file_.empty()) first_file_ = fs::path(folder_name) / name;
  hash_.add_bytes(folder_name);
  if (!folder_name.empty()) hash_.add_byte('/');
  hash_.add_bytes(name);
  hash_.add_byte(0);
}

void FolderIndexWriter::add_content_of_first_file(const fs::path& root) {
  constexpr size_t kBytes = 65536;
  std::string bytes(kBytes, '\0');
  std::ifstream file(root / first_file_, std::ios::binary);
  file.read(bytes.data(), kBytes);  // the loader reports a file that cannot be read
  bytes.resize(static_cast<size_t>(file.gcount()));
  hash_.add_bytes(bytes);
}

uint64_t FolderIndexWriter::finish(const std::vector<std::string>& classes) {
  out_.add_section(kFileEnds, ends_);
  if (!classes.empty()) {
    out_.begin(kLabels);
    for (size_t i = 0; i < folders_.size(); ++i) {
      const uint64_t end = i + 1 < folders_.size() ? folders_[i + 1].first_file : ends_.size();
      const std::vector<int64_t> labels(end - folders_[i].first_file, folders_[i].label);
      out_.add(std::span<const int64_t>(labels));
    }
  }
  out_.add_section(kFolders, folders_);
  out_.begin(kFolderNames);
  std::vector<uint64_t> name_ends;
  uint64_t end = 0;
  for (int64_t i = 0; i < folder_names_.size(); ++i) {
    out_.add_bytes(folder_names_[i]);
    name_ends.push_back(end += folder_names_[i].size());
  }
  out_.add_section(kFolderNameEnds, name_ends);
  out_.add_section(kStamps, stamps_);
  out_.begin(kClasses);
  for (const std::string& name : classes) out_.add_bytes(name + '\0');
  out_.add_section(kUnreadable, unreadable_);
  out_.begin(kLeftOut);
  out_.add_bytes(left_out_.text());
  return hash_.value();
}

bool is_empty_file(const fs::path& file) {
  std::error_code is_gone;
  return fs::file_size(file, is_gone) == 0 || is_gone;
}

std::vector<Remark> remarks_on(const FolderIndex& index, const std::string& where,
                               const std::function<fs::path(int64_t)>& path_of) {
  UnreadableFiles unreadable;
  for (const uint64_t file : index.unreadable()) {
    // An empty file may have been written since: that changes neither its folder's stamp nor the
    // index. Others are not opened again: there may be a million.
    const fs::path path = path_of(static_cast<int64_t>(file));
    const bool was_empty = kind_of(path.string()) == NameKind::kDecoded;
    if (was_empty && !is_empty_file(path)) continue;
    unreadable[path.string()] = !was_empty           ? kOtherContent
                                : base::exists(path) ? kEmptyFile
                                                     : kMissingFile;
  }
  std::vector<Remark> remarks;
  add_remark(remarks, where + ": left out", index.left_out(),
             index.labels().empty() ? "neither JPEG nor PNG"
                                    : "not in a class folder, neither JPEG nor PNG, or a link "
                                      "to nothing");
  std::ranges::move(unreadable_remark(unreadable), std::back_inserter(remarks));
  return remarks;
}

std::vector<fs::path> images_below(const fs::path& root, FileCounts& others) {
  std::vector<Entered> chain;
  std::map<std::string, Listing> listings;
  list_all(root, "", chain, listings);
  std::vector<fs::path> files;
  for (const auto& [name, listing] : listings) {
    const fs::path folder = name;
    for (int64_t i = 0; i < listing.images.size(); ++i) {
      const fs::path file = folder / listing.images[i];
      if (kind_of(file.string()) != NameKind::kDecoded && is_unreadable(root / file)) {
        others.add(file.string());
      } else {
        files.push_back(file);
      }
    }
    for (const std::string& other : listing.others) others.add((folder / other).string());
  }
  std::ranges::sort(files);
  return files;
}

std::vector<std::string> class_names(const fs::path& root) {
  return list_folder(root, /*by_content=*/false).folders;
}

FolderIndex index_class_folders(const fs::path& root, const IndexCacheOptions& cache,
                                const std::vector<std::string>& classes) {
  const auto path_of = [&](size_t, std::string_view name) { return root / name; };
  std::string key = "image_folder " + real_name(root);
  for (const std::string& name : classes) key += '\n' + name;
  return FolderIndex(open_index(
      {.name = root.string(),
       .key = key,
       .is_current = is_current(/*has_classes=*/true, path_of),
       .build = [&](IndexWriter& out) { return write_class_folders(root, classes, out); }},
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
       .is_current = is_current(/*has_classes=*/false, path_of),
       .build = [&](IndexWriter& out) { return write_pairs(images, masks, out); }},
      cache));
}

}  // namespace syncbn::data::detail
