#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "index/index_cache.h"
#include "sets/folder_index.h"

namespace syncbn::data::detail {

/// The names of a folder's folders, sorted.
std::vector<std::string> class_names(const std::filesystem::path& root);

/// Whether torchvision takes a file of this name for an image.
bool has_image_extension(std::string_view name);

/// The image files below a folder of class folders, in the order of torchvision's ImageFolder:
/// classes by name, in each class folders by path, in each folder files by name.
/// @throws base::UserError naming the folder when it has no class folders, or naming the classes
///   that have no image.
FolderIndex index_class_folders(const std::filesystem::path& root, const IndexCacheOptions& cache);

/// The images of a folder, sorted, as files 0 to n - 1, and as files n to 2 n - 1 the masks of the
/// same name without extension.
/// @throws base::UserError naming the folder that has no images, or the image without a mask.
FolderIndex index_pairs(const std::filesystem::path& images, const std::filesystem::path& masks,
                        const IndexCacheOptions& cache);

}  // namespace syncbn::data::detail
