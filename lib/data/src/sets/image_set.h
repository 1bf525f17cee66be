#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <syncbn/data/image_sets.h>

namespace syncbn::data::detail {

/// The base of all sets of images: transforms an image and writes it into a batch.
class ImageSet : public SampleDataset {
 public:
  std::vector<int64_t> sample_shape() const override;
  Normalization normalization() const override { return normalization_; }

 protected:
  /// @param kind the set's type, for messages.
  /// @param channels 1 or 3.
  /// @param stored the size of all images before they are transformed, if they have the same.
  /// @throws base::UserError if the transforms leave images of different sizes, or mean and std do
  ///   not match the channels.
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

/// A member of a base class as a member of `Options`, which Schema::field requires.
template <class Options, class Base, class Member>
Member Options::*member_of(Member Base::*member) {
  return member;
}

template <class Options>
void describe_image_set(config::Schema<Options>& schema) {
  schema.field("transforms", member_of<Options>(&ImageSetOptions::transforms),
               "applied to training images, in this order");
  schema.field("test_transforms", member_of<Options>(&ImageSetOptions::test_transforms),
               "applied to validation and test images, in this order");
  schema.field("mean", member_of<Options>(&ImageSetOptions::mean),
               "mean of each channel, of values from 0 to 1; subtracted on the device");
  schema
      .field("std", member_of<Options>(&ImageSetOptions::std),
             "standard deviation of each channel, by which the device divides")
      .above(0);
}

template <class Options>
void describe_image_files(config::Schema<Options>& schema) {
  describe_image_set(schema);
  schema.field("exif_orientation", member_of<Options>(&ImageFileOptions::exif_orientation),
               "turn images as their EXIF data asks");
  schema
      .field("max_pixels", member_of<Options>(&ImageFileOptions::max_pixels),
             "images with more pixels are refused before they are decoded")
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

}  // namespace syncbn::data::detail
