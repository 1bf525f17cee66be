#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <syncbn/data/image_sets.h>

#include "sets/file_bytes.h"

namespace syncbn::data::detail {

/// How the images of a set are written to batches: transforms, size, normalisation. Thread-safe.
class ImageFormat {
 public:
  struct Source {
    int64_t channels = 3;  ///< 1 or 3
    /// The size of all images before the transforms, if it is the same.
    std::optional<ImageSize> size = {};
    /// Whether batches may have images of different sizes.
    bool may_vary = false;
    /// With may_vary: the largest width and height before the transforms, if known.
    std::optional<ImageSize> max_size = {};
    bool has_boxes = false;  ///< the transforms must move boxes with the images
    /// Upper bound on the pixels of an image, before and after the transforms.
    int64_t max_pixels = DecodeOptions{}.max_pixels;
  };

  /// @param kind the set's type, for messages.
  /// @throws base::UserError if the transforms leave images of different sizes (with may_vary:
  ///   unbounded sizes), leave too many pixels or do not move boxes, or if mean and std do not
  ///   match the channels.
  ImageFormat(const std::string& kind, const ImageSetOptions& options, Split split,
              const Source& source);

  const Pipeline& pipeline() const { return pipeline_; }
  /// The largest size, if sizes_vary().
  ImageSize size() const { return size_; }
  bool sizes_vary() const { return sizes_vary_; }
  std::vector<int64_t> sample_shape() const { return {channels_, size_.height, size_.width}; }
  const Normalization& normalization() const { return normalization_; }

  /// Writes a transformed image as [channels, height, width], and its size.
  void write(const Image& image, const SampleSlot& slot) const;
  /// Writes labels of pixels as [height, width].
  void write_mask(const Image& mask, const SampleSlot& slot) const;

 private:
  Pipeline pipeline_;
  int64_t channels_;
  ImageSize size_;
  bool sizes_vary_ = false;
  Normalization normalization_;
};

/// A set of images: `Base` is SampleDataset or an interface derived from it.
template <class Base>
class ImageSetOf : public Base {
 public:
  std::vector<int64_t> sample_shape() const override { return format_.sample_shape(); }
  bool sizes_vary() const override { return format_.sizes_vary(); }
  Normalization normalization() const override { return format_.normalization(); }

 protected:
  explicit ImageSetOf(ImageFormat format) : format_(std::move(format)) {}

  const ImageFormat& format() const { return format_; }
  const Pipeline& pipeline() const { return format_.pipeline(); }

 private:
  ImageFormat format_;
};

using ImageSet = ImageSetOf<SampleDataset>;

DecodeOptions decode_options(const ImageFileOptions& options);

/// A set of image files, with one label each unless a derived class reads samples otherwise.
template <class Base>
class ImageFilesOf : public ImageSetOf<Base> {
 public:
  SampleFacts facts(int64_t index) const override {
    ImageDecoder decoder = open(index);
    const bool is_scaled = decoder.has_high_bits() && !decode_.clamp_high_bits;
    return {.orientation = decode_.exif_orientation ? 1 : decoder.file_orientation(),
            .largest_scaled = is_scaled
                                  ? std::optional<int>(std::ranges::max(decoder.decode().pixels))
                                  : std::nullopt};
  }

  void read_sample(int64_t index, SampleRandom& random, const SampleSlot& slot) const override {
    ImageDecoder decoder = open(index);
    this->format().write(this->pipeline().run(decoder, random), slot);
    slot.target[0] = this->labels()[static_cast<size_t>(index)];
  }

  std::vector<Remark> remarks() const override { return remarks_; }

 protected:
  ImageFilesOf(const std::string& kind, const ImageFileOptions& options, Split split,
               ImageFormat::Source source)
      : ImageSetOf<Base>({kind, options, split, source}), decode_(decode_options(options)) {}

  const DecodeOptions& decode() const { return decode_; }
  void set_remarks(std::vector<Remark> remarks) { remarks_ = std::move(remarks); }

  /// The result is valid until this thread reads the next file.
  virtual ImageDecoder open(int64_t index) const {
    const std::string file = this->name_of(index);
    return {read_whole_file(file), file, decode_};
  }

 private:
  DecodeOptions decode_;
  std::vector<Remark> remarks_;
};

using ImageFiles = ImageFilesOf<SampleDataset>;

/// The option for a split.
const std::string& of_split(Split split, const std::string& train, const std::string& val,
                            const std::string& test);

/// The first transform that may crop or turn an image (any but resize); null if there is none.
const config::Component<TransformKind>* first_but_resize(
    const std::vector<config::Component<TransformKind>>& steps);

/// A class that another split has must be one of the training split, which may have more.
/// @param subject of the message: "image_folder: 'val' has class folders"; `train` names the folder
///   or file of the training split
/// @throws base::UserError naming the classes that the training split lacks.
void check_classes(const std::string& subject, const std::set<std::string>& own,
                   const std::string& train, const std::set<std::string>& trained);

/// Converts a base class's member pointer to one of `Options`, as Schema::field requires.
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
      .field(
          "high_bits", member_of<Options>(&ImageFileOptions::high_bits),
          "what remains of PNGs of 16 bits: scale keeps the upper 8 bits, clamp makes values above "
          "255 white, as Pillow does with grey ones")
      .one_of({"scale", "clamp"});
  schema
      .field("max_pixels", member_of<Options>(&ImageFileOptions::max_pixels),
             "images with more pixels are refused before they are decoded, or made by a transform")
      .at_least(1);
  schema
      .field("max_scans", member_of<Options>(&ImageFileOptions::max_scans),
             "progressive JPEGs with more scans are refused")
      .between(1, 1'000'000);
  schema.field("cache_dir", member_of<Options>(&ImageFileOptions::cache_dir),
               "where the index of the files is kept; empty: $XDG_CACHE_HOME/syncbn, or "
               "~/.cache/syncbn");
}

}  // namespace syncbn::data::detail
