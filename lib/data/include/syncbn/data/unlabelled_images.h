#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <syncbn/data/image_sets.h>

namespace syncbn::data {

/// The options of a set of image files, of which test_transforms, mean, std and the limits count.
struct UnlabelledImagesOptions : ImageFileOptions {
  /// A folder, or one file; empty: none, for a set of no samples that tells their shape.
  std::string images;
  int64_t classes = 0;
  std::vector<std::string> class_names;  ///< by label; empty: none
  /// Whether targets are of the shape [H, W], as in sets with masks.
  bool labels_pixels = false;
  /// By label, for a BoxDataset; empty: the set is none.
  std::vector<int64_t> category_ids;

  static void describe(config::Schema<UnlabelledImagesOptions>& schema);
};

/// Images to ask a network about. Targets have no meaning.
struct UnlabelledImages {
  std::shared_ptr<const SampleDataset> set;
  std::vector<std::filesystem::path> files;  ///< by sample, below the folder, sorted
  /// Files below the folder that are neither JPEG nor PNG by their names, sorted, without hidden
  /// ones.
  std::vector<std::filesystem::path> others;
  /// Whether samples show the whole of their images, in another resolution.
  bool are_whole = false;
  /// Of an image file, as it is decoded. @throws base::UserError if the file cannot be read.
  std::function<ImageSize(int64_t index)> original_size;
};

/// The file, or all JPEG and PNG files in the folder and the folders in it.
/// @throws base::UserError naming the folder if it cannot be read or has no such file
UnlabelledImages load_unlabelled_images(UnlabelledImagesOptions options);

/// The files below a folder of class folders that are no samples by their names, sorted, without
/// hidden ones.
/// @throws base::UserError naming the folder if it cannot be read
std::vector<std::filesystem::path> files_left_out(const std::filesystem::path& folder);

}  // namespace syncbn::data
