#pragma once

#include <filesystem>
#include <optional>
#include <vector>

#include <syncbn/data/unlabelled_images.h>
#include <syncbn/train/checkpoint.h>
#include <syncbn/train/config.h>

namespace syncbn::train {

/// How image files without labels become samples: as those that the configuration evaluates on,
/// with the classes of the checkpoint. Nothing for data that has no image files.
/// @param checkpoint null: of unknown classes
std::optional<data::UnlabelledImagesOptions> unlabelled_options(const Config& config,
                                                                const Checkpoint* checkpoint);

/// Whether the training data has to tell the classes.
bool lacks_classes(const Config& config, const data::UnlabelledImagesOptions& options);

/// Logs a warning with the number of files that are no images and the first one. Does nothing if
/// there are none.
void warn_of_left_out(const std::vector<std::filesystem::path>& files);

}  // namespace syncbn::train
