#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <syncbn/data/image_sets.h>

namespace syncbn::data::detail {

/// What all sets of images have in common: what becomes of an image once it is there.
class ImageSet : public SampleDataset {
 public:
  std::vector<int64_t> sample_shape() const override;
  Normalization normalization() const override { return normalization_; }

 protected:
  /// `kind` is the set's type, for messages; `stored` the size that all images have before they are
  /// transformed, if they do.
  /// @throws base::UserError when the transforms leave images of different sizes, or mean and std
  ///   do not fit the channels.
  ImageSet(const std::string& kind, const ImageSetOptions& options, Split split, int64_t channels,
           std::optional<ImageSize> stored);

  const Pipeline& pipeline() const { return pipeline_; }
  ImageSize image_size() const { return size_; }

  /// Writes a transformed image as [channels, height, width].
  void put(const Image& image, std::span<uint8_t> out) const;

 private:
  Pipeline pipeline_;
  int64_t channels_;
  ImageSize size_;
  Normalization normalization_;
};

DecodeOptions decode_options(const ImageFileOptions& options);

/// A member of a base class as one of `Options`, as Schema takes it.
template <class Options, class Base, class Member>
Member Options::*member_of(Member Base::*member) {
  return member;
}

template <class Options>
void describe_image_set(config::Schema<Options>& schema) {
  schema.field("transforms", member_of<Options>(&ImageSetOptions::transforms),
               "what happens to a training image, one after the other");
  schema.field("test_transforms", member_of<Options>(&ImageSetOptions::test_transforms),
               "what happens to a test image");
  schema.field("mean", member_of<Options>(&ImageSetOptions::mean),
               "of each channel, of values from 0 to 1; it is subtracted on the device");
  schema
      .field("std", member_of<Options>(&ImageSetOptions::std),
             "of each channel; values are divided by it on the device")
      .above(0);
}

template <class Options>
void describe_image_files(config::Schema<Options>& schema) {
  describe_image_set(schema);
  schema.field("exif_orientation", member_of<Options>(&ImageFileOptions::exif_orientation),
               "turn images as their EXIF data asks");
  schema
      .field("max_pixels", member_of<Options>(&ImageFileOptions::max_pixels),
             "images with more are refused before they are decoded")
      .at_least(1);
  schema
      .field("max_scans", member_of<Options>(&ImageFileOptions::max_scans),
             "progressive JPEGs with more scans are refused")
      .at_least(1)
      .at_most(1'000'000);
  schema.field("cache_dir", member_of<Options>(&ImageFileOptions::cache_dir),
               "where the index of the files is kept; empty: $XDG_CACHE_HOME/syncbn, or "
               "~/.cache/syncbn");
}

/// Images of one size that lie in memory with their labels, row by row, channels side by side.
struct StoredImages {
  int64_t channels = 1;
  ImageSize size;
  int64_t classes = 10;
  std::vector<uint8_t> pixels = {};
  std::vector<int64_t> labels = {};
};

std::shared_ptr<const Dataset> make_memory_set(const std::string& kind,
                                               const ImageSetOptions& options, Split split,
                                               StoredImages images);

}  // namespace syncbn::data::detail
