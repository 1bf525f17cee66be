#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <syncbn/data/image_sets.h>

namespace syncbn::data {

/// Options of load_unlabelled_images(). It uses the inherited test_transforms, mean, std and
/// decoding options; `transforms` and `cache_dir` have no effect.
struct UnlabelledImagesOptions : ImageFileOptions {
  /// A folder or a file; empty: the set has no samples, only their shape.
  std::string images;
  int64_t classes = 0;
  std::vector<std::string> class_names;  ///< by label; empty: none
  /// Whether targets have the shape [H, W], as in sets with masks.
  bool labels_pixels = false;
  /// By label; if not empty, the set is a BoxDataset.
  std::vector<int64_t> category_ids;

  static void describe(config::Schema<UnlabelledImagesOptions>& schema);
};

/// Images for inference. Their targets have no meaning.
struct UnlabelledImages {
  std::shared_ptr<const SampleDataset> set;
  std::vector<std::filesystem::path> files;  ///< by sample, relative to the folder, sorted
  /// The images of other formats below the folder, without hidden ones: "2 files (1 .gif, 1 .heic),
  /// such as 'a/b.gif'"; "" if there are none.
  std::string others;
  int64_t num_others = 0;
  /// Whether samples show whole images, at most resized.
  bool are_whole = false;
  /// The size of a decoded image file. @throws base::UserError if the file cannot be read.
  std::function<ImageSize(int64_t index)> original_size;
};

/// Loads the file, or all JPEG and PNG files in and below the folder, by extension or content.
/// @throws base::UserError naming the folder if it cannot be read or has no such file
UnlabelledImages load_unlabelled_images(UnlabelledImagesOptions options);

}  // namespace syncbn::data
