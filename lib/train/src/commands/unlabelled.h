#pragma once

#include <filesystem>
#include <optional>
#include <vector>

#include <syncbn/data/unlabelled_images.h>
#include <syncbn/train/checkpoint.h>
#include <syncbn/train/config.h>

namespace syncbn::train {

/// How image files without labels become samples: like those that the configuration evaluates on,
/// with the classes of the checkpoint. Nothing for data that has no image files.
/// @param checkpoint null if the classes are unknown
std::optional<data::UnlabelledImagesOptions> unlabelled_options(const Config& config,
                                                                const Checkpoint* checkpoint);

/// Whether the classes have to come from the training data.
bool lacks_classes(const Config& config, const data::UnlabelledImagesOptions& options);

/// Warns of files that are not images: their number and the first one. Does nothing if there are
/// none.
void warn_of_left_out(const std::vector<std::filesystem::path>& files);

}  // namespace syncbn::train
