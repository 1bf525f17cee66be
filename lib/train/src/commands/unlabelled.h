#pragma once

#include <optional>

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

}  // namespace syncbn::train
