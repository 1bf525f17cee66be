#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include <syncbn/data/boxes.h>

namespace syncbn::data::detail {

/// The part of a file with COCO's instances that a data set needs: images and boxes, no polygons.
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

/// Needs memory only for the result, about twice that while it reads. Does not check polygons.
/// @throws base::UserError naming the file and the annotation, image or category if the file is not
///   JSON, lacks a key, has a duplicate or unknown id or two categories of the same name, or if a
///   box is more than a pixel outside of its image.
CocoInstances read_coco_instances(const std::filesystem::path& path);

}  // namespace syncbn::data::detail
