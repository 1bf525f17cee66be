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
    std::string file;     ///< the normal form, with slashes for Windows's backslashes
    std::string written;  ///< the file_name, if it differs
    size_t first = 0;     ///< of its annotations
    size_t count = 0;

    const std::string& file_name() const { return written.empty() ? file : written; }
    bool operator==(const Photo& other) const {
      return id == other.id && size == other.size && file == other.file;
    }
  };

  std::vector<Photo> photos;            ///< by id
  std::vector<Annotation> annotations;  ///< by image, then in the file's order
  /// The different names of the training file's categories, by the highest id of each.
  std::vector<std::string> classes;
  std::vector<int64_t> class_ids;  ///< the highest of each class
  std::vector<Remark> remarks;     ///< on what was left out, joined, repeated or lacks an id

  std::span<const Annotation> of(const Photo& photo) const {
    return std::span(annotations).subspan(photo.first, photo.count);
  }
};

/// Needs memory only for the result, about twice that while it reads. Does not check polygons.
/// Reads numbers as tools write them: 1.0, "1" and true are 1, and a box may be one text. Leaves
/// out annotations that lack a value, have an unknown id, or have a box that is not finite or more
/// than a pixel outside of its image, and images without any other annotation that had such a box,
/// or none where one belongs. Categories with the same name are one class. Takes an image that is
/// listed again, with the same file name (in normal form) and size, once, and its equal boxes once.
/// @param training the file with the categories of all splits, which are matched by name: another
///   file may lack some. If it does not exist, those of `path` are taken.
/// @throws base::UserError naming the file, if it is not JSON, lacks a list or has only images that
///   are left out, the image or category that lacks a key or has the id of another, and classes of
///   boxes that `training` lacks.
CocoInstances read_coco_instances(const std::filesystem::path& path,
                                  const std::filesystem::path& training = {});

}  // namespace syncbn::data::detail
