#pragma once

#include <string>

#include <syncbn/train/config.h>

namespace syncbn::train {

/// `train predict FOLDER`: asks the network of a checkpoint about each image in the folder, and
/// writes what the task says of them into the folder `output`. Every rank calls it, and takes its
/// share of the images.
/// @param text of the configuration, in YAML
/// @param name of the run
/// @param average whether to take the moving average of the weights
/// @return the program's exit code
/// @throws base::UserError on one rank, QuietExit on the others, for a folder without images,
///   weights that do not fit, and ranks that were not started alike; base::UserError on the ranks
///   with an image that cannot be read
int predict(const Config& config, const std::string& text, const std::string& name,
            const std::string& images, const std::string& output, bool average);

}  // namespace syncbn::train
