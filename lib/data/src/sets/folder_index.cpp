#include "sets/folder_index.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <utility>

#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

namespace syncbn::data::detail {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(const fs::path& folder, const std::string& why) {
  throw base::UserError(fmt::format("cannot read the image folder '{}': {}", folder.string(), why));
}

/// Calls visit(folder, name) for each file below, links to folders followed.
template <class Visit>
void for_each_file(const fs::path& root, const Visit& visit) {
  try {
    const auto options = fs::directory_options::follow_directory_symlink;
    for (const auto& entry : fs::recursive_directory_iterator(root, options)) {
      std::error_code broken_link;
      if (entry.is_directory(broken_link)) continue;
      visit(entry.path().parent_path().string(), entry.path().filename().string());
    }
  } catch (const fs::filesystem_error& error) {
    fail(error.path1().empty() ? root : error.path1(), error.code().message());
  }
}

}  // namespace

void NameList::add(std::string_view name) {
  names_ += name;
  ends_.push_back(names_.size());
}

std::string_view NameList::operator[](int64_t index) const {
  const auto at = static_cast<size_t>(index);
  const size_t begin = at == 0 ? 0 : ends_[at - 1];
  return std::string_view(names_).substr(begin, ends_[at] - begin);
}

std::vector<std::string> class_names(const fs::path& root) {
  std::vector<std::string> names;
  try {
    for (const auto& entry : fs::directory_iterator(root)) {
      if (entry.is_directory()) names.push_back(entry.path().filename().string());
    }
  } catch (const fs::filesystem_error& error) {
    fail(root, error.code().message());
  }
  std::ranges::sort(names);
  return names;
}

bool has_image_extension(std::string_view name) {
  constexpr std::array<std::string_view, 9> kExtensions = {".jpg", ".jpeg", ".png",  ".ppm", ".bmp",
                                                           ".pgm", ".tif",  ".tiff", ".webp"};
  std::string lower(name);
  std::ranges::transform(lower, lower.begin(), [](unsigned char c) { return std::tolower(c); });
  return std::ranges::any_of(kExtensions, [&](auto tail) { return lower.ends_with(tail); });
}

FolderIndex index_class_folders(const fs::path& root) {
  FolderIndex index;
  index.classes = class_names(root);
  if (index.classes.empty()) fail(root, "it has no folders, of which each would be a class");
  std::vector<std::string> empty;
  for (size_t label = 0; label < index.classes.size(); ++label) {
    std::vector<std::pair<std::string, std::string>> found;
    for_each_file(root / index.classes[label], [&](std::string folder, std::string name) {
      if (has_image_extension(name)) found.emplace_back(std::move(folder), std::move(name));
    });
    std::ranges::sort(found);
    if (found.empty()) empty.push_back(index.classes[label]);
    for (const auto& [folder, name] : found) {
      index.files.add(fs::path(folder).lexically_relative(root).append(name).string());
      index.labels.push_back(static_cast<int64_t>(label));
    }
  }
  if (!empty.empty()) {
    fail(root, fmt::format("there are no images in {}; remove what is no class",
                           base::join(empty, ", ")));
  }
  return index;
}

std::vector<std::string> image_names(const fs::path& folder) {
  std::vector<std::string> names;
  try {
    for (const auto& entry : fs::directory_iterator(folder)) {
      std::string name = entry.path().filename().string();
      std::error_code broken_link;
      if (has_image_extension(name) && !entry.is_directory(broken_link)) {
        names.push_back(std::move(name));
      }
    }
  } catch (const fs::filesystem_error& error) {
    fail(folder, error.code().message());
  }
  std::ranges::sort(names);
  return names;
}

}  // namespace syncbn::data::detail
