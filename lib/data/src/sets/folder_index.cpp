#include "sets/folder_index.h"

#include <fmt/format.h>

#include <algorithm>

#include <syncbn/base/error.h>

namespace syncbn::data::detail {
namespace {

enum FolderSection : size_t {
  kFileNames = kKeySection + 1,
  kFileEnds,
  kLabels,
  kFolders,
  kFolderNames,
  kFolderNameEnds,
  kStamps,
  kClasses,
};

/// Names that lie one behind the other, and where each ends.
std::string_view name_at(std::string_view names, std::span<const uint64_t> ends, size_t index) {
  const uint64_t begin = index == 0 ? 0 : ends[index - 1];
  return names.substr(begin, ends[index] - begin);
}

std::string below(std::string_view folder, std::string_view name) {
  return folder.empty() ? std::string(name) : fmt::format("{}/{}", folder, name);
}

}  // namespace

FolderIndex::FolderIndex(MappedIndex index)
    : index_(std::move(index)),
      folders_(index_.array<Folder>(kFolders)),
      names_(index_.text(kFileNames)),
      ends_(index_.array<uint32_t>(kFileEnds)),
      labels_(index_.array<int64_t>(kLabels)) {}

std::string FolderIndex::file(int64_t index) const {
  const auto at = static_cast<uint64_t>(index);
  const auto behind = std::ranges::upper_bound(folders_, at, {}, &Folder::first_file);
  const auto folder = behind - folders_.begin() - 1;
  const auto& [first_file, first_byte, label] = folders_[static_cast<size_t>(folder)];
  const uint32_t begin = at == first_file ? 0 : ends_[at - 1];
  return below(name_at(index_.text(kFolderNames), index_.array<uint64_t>(kFolderNameEnds),
                       static_cast<size_t>(folder)),
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

FolderIndexWriter::FolderIndexWriter(IndexWriter& out) : out_(out) {
  out_.begin(kFileNames);
}

void FolderIndexWriter::begin_folder(std::string_view name, const FileStamp& stamp, int64_t label) {
  folder_names_.add(name);
  stamps_.push_back(stamp);
  folders_.push_back({.first_file = ends_.size(), .first_byte = bytes_, .label = label});
}

void FolderIndexWriter::add_file(std::string_view name) {
  const FolderIndex::Folder& folder = folders_.back();
  out_.add_bytes(name);
  bytes_ += name.size();
  // Fits: NameList takes no more, and it has a folder's names before they come here.
  ends_.push_back(static_cast<uint32_t>(bytes_ - folder.first_byte));
  const std::string_view folder_name = folder_names_[std::ssize(folders_) - 1];
  hash_.add_bytes(folder_name);
  if (!folder_name.empty()) hash_.add_byte('/');
  hash_.add_bytes(name);
  hash_.add_byte(0);
}

uint64_t FolderIndexWriter::finish(const std::vector<std::string>& classes) {
  out_.begin(kFileEnds);
  out_.add(std::span<const uint32_t>(ends_));
  if (!classes.empty()) write_labels();
  out_.begin(kFolders);
  out_.add(std::span<const FolderIndex::Folder>(folders_));
  out_.begin(kFolderNames);
  std::vector<uint64_t> name_ends;
  uint64_t end = 0;
  for (int64_t i = 0; i < folder_names_.size(); ++i) {
    out_.add_bytes(folder_names_[i]);
    name_ends.push_back(end += folder_names_[i].size());
  }
  out_.begin(kFolderNameEnds);
  out_.add(std::span<const uint64_t>(name_ends));
  out_.begin(kStamps);
  out_.add(std::span<const FileStamp>(stamps_));
  out_.begin(kClasses);
  for (const std::string& name : classes) out_.add_bytes(name + '\0');
  return hash_.value();
}

void FolderIndexWriter::write_labels() {
  out_.begin(kLabels);
  for (size_t i = 0; i < folders_.size(); ++i) {
    const uint64_t end = i + 1 < folders_.size() ? folders_[i + 1].first_file : ends_.size();
    const std::vector<int64_t> labels(end - folders_[i].first_file, folders_[i].label);
    out_.add(std::span<const int64_t>(labels));
  }
}

bool folders_are_unchanged(
    const MappedIndex& index,
    const std::function<std::filesystem::path(size_t, std::string_view)>& path_of) {
  const auto stamps = index.array<FileStamp>(kStamps);
  const auto ends = index.array<uint64_t>(kFolderNameEnds);
  for (size_t i = 0; i < stamps.size(); ++i) {
    if (stamp_of(path_of(i, name_at(index.text(kFolderNames), ends, i))) != stamps[i]) return false;
  }
  return true;
}

}  // namespace syncbn::data::detail
