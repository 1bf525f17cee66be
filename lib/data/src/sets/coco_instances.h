#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include <syncbn/data/boxes.h>

namespace syncbn::data::detail {

/// What a data set needs of a file with COCO's instances: images and their boxes, not the polygons.
struct CocoInstances {
  struct Photo {
    int64_t id = 0;
    ImageSize size;
    std::string file;
    size_t first = 0;  ///< of its annotations
    size_t count = 0;
  };

  std::vector<Photo> photos;            ///< by id
  std::vector<Annotation> annotations;  ///< by image, then in the file's order
  std::vector<std::string> classes;     ///< the categories' names by id; label 0 is the lowest id
  std::vector<int64_t> class_ids;       ///< of the categories

  std::span<const Annotation> of(const Photo& photo) const {
    return std::span(annotations).subspan(photo.first, photo.count);
  }
};

/// Takes memory for the result only, about twice as much while it reads. Polygons are not checked.
/// @throws base::UserError naming the file and the annotation, image or category if the file is not
///   JSON, misses a key, has an id twice or one that is unknown, or a box that is not within its
///   image (up to a pixel).
CocoInstances read_coco_instances(const std::filesystem::path& path);

}  // namespace syncbn::data::detail
