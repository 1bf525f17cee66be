#include "commands/unlabelled.h"

namespace syncbn::train {

std::optional<data::UnlabelledImagesOptions> unlabelled_options(const Config& config,
                                                                const Checkpoint* checkpoint) {
  const config::Value section = config.data.write();
  if (section.find("test_transforms") == nullptr) return std::nullopt;
  data::UnlabelledImagesOptions options;
  options.labels_pixels = config.task.type() == "segmentation";
  if (checkpoint != nullptr) {
    options.class_names = checkpoint->classes;
    options.category_ids = checkpoint->category_ids;
  }
  options.classes = std::ssize(options.class_names);
  config::Value known = config::Value::of_map();
  for (const char* key : {"test_transforms", "mean", "std", "exif_orientation", "high_bits",
                          "max_pixels", "max_scans"}) {
    if (const config::Value* value = section.find(key)) known.set(key, *value);
  }
  config::Faults faults;
  config::Schema<data::UnlabelledImagesOptions>::get().read(known, options, "data", faults);
  faults.throw_if_any();
  return options;
}

bool lacks_classes(const Config& config, const data::UnlabelledImagesOptions& options) {
  return options.classes == 0 ||
         (config.task.type() == "detection" && options.category_ids.empty());
}

}  // namespace syncbn::train
