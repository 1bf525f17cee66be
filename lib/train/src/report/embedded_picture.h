#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace syncbn::train {

/// A file pictures/NAME-STEP.png of a run.
struct PictureFile {
  std::filesystem::path path;
  std::string name;  ///< "samples"
  int64_t step = 0;
};

/// The pictures of a run by name and step. If a name has more than `limit`, the first, the last,
/// and others evenly between.
std::vector<PictureFile> pictures_of(const std::filesystem::path& folder, size_t limit);

/// A picture in a page: "data:image/png;base64,…".
struct EmbeddedPicture {
  std::string address = {};
  int64_t width = 0;  ///< of the file, before shrinking
  int64_t height = 0;
};

/// A PNG as it is or, if it has more than `max_bytes`, a smaller JPEG of about as many at most.
/// @throws base::UserError for a file that is not a PNG
EmbeddedPicture embedded_picture(const std::filesystem::path& file, size_t max_bytes);

std::string base64(std::string_view bytes);

}  // namespace syncbn::train
