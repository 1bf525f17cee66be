#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace syncbn::data::detail {

/// Many names, one behind the other: a few bytes each besides the name, not an object.
class NameList {
 public:
  void add(std::string_view name);
  std::string_view operator[](int64_t index) const;
  int64_t size() const { return std::ssize(ends_); }

 private:
  std::string names_;
  std::vector<uint64_t> ends_;
};

/// The image files below a folder of class folders, in the order of torchvision's ImageFolder:
/// classes by name, in each class folders by path, in each folder files by name.
struct FolderIndex {
  std::vector<std::string> classes;
  NameList files;  ///< relative to the folder
  std::vector<int64_t> labels;
};

/// The names of a folder's folders, sorted.
std::vector<std::string> class_names(const std::filesystem::path& root);

/// Whether torchvision takes a file of this name for an image.
bool has_image_extension(std::string_view name);

/// @throws base::UserError naming the folder when it has no class folders, or naming the classes
///   that have no image.
FolderIndex index_class_folders(const std::filesystem::path& root);

/// The names of the files with an image extension in a folder, sorted.
std::vector<std::string> image_names(const std::filesystem::path& folder);

}  // namespace syncbn::data::detail
