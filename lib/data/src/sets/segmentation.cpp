// Data sets of images with masks, which hold the label of each pixel.
#include <fmt/format.h>

#include <iterator>
#include <set>
#include <sstream>

#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/base/hash.h>
#include <syncbn/base/open_file.h>
#include <syncbn/base/text.h>

#include "sets/file_bytes.h"
#include "sets/folder_index.h"
#include "sets/image_set.h"

namespace syncbn::data {
namespace {

namespace fs = std::filesystem;

/// Reads pairs of an image file and a mask file, which subclasses name.
class MaskedImages : public detail::ImageSet {
 public:
  struct Labels {
    int64_t classes = 0;
    std::vector<std::string> names = {};  ///< by label; empty: none
    uint8_t ignored = 255;
  };

  std::span<const int64_t> labels() const override { return {}; }
  int64_t num_classes() const override { return labels_.classes; }
  std::vector<std::string> class_names() const override { return labels_.names; }
  int64_t ignore_index() const override { return labels_.ignored; }
  std::vector<int64_t> target_shape() const override {
    return {format().size().height, format().size().width};
  }
  std::string name_of(int64_t index) const override { return image_file(index).string(); }

  void read_sample(int64_t index, SampleRandom& random, const SampleSlot& slot) const override {
    ImageSample sample;
    sample.ignored_label = labels_.ignored;
    const std::string image = name_of(index);
    sample.image = ImageDecoder(detail::read_whole_file(image), image, decode_).decode();
    const std::string mask = mask_file(index).string();
    sample.mask = ImageDecoder(detail::read_whole_file(mask), mask, decode_).decode_mask();
    check(sample, mask);
    sample = pipeline().run(std::move(sample), random);
    format().write(sample.image, slot);
    format().write_mask(*sample.mask, slot);
  }

 protected:
  MaskedImages(const std::string& kind, const ImageFileOptions& options, Split split, Labels labels)
      : ImageSetOf({kind, options, split, {.may_vary = true, .max_pixels = options.max_pixels}}),
        decode_(detail::decode_options(options)),
        labels_(std::move(labels)) {}

  virtual fs::path image_file(int64_t index) const = 0;
  virtual fs::path mask_file(int64_t index) const = 0;

 private:
  void check(const ImageSample& sample, const std::string& mask_file) const {
    const Image& mask = *sample.mask;
    if (mask.width != sample.image.width || mask.height != sample.image.height) {
      throw base::UserError(fmt::format("the mask '{}' has {} x {} pixels, its image {} x {}",
                                        mask_file, mask.width, mask.height, sample.image.width,
                                        sample.image.height));
    }
    for (const uint8_t label : mask.pixels) {
      if (label < labels_.classes || label == labels_.ignored) continue;
      throw base::UserError(fmt::format(
          "the mask '{}' has the label {}; labels are below {}, or {} for ignored pixels",
          mask_file, label, labels_.classes, labels_.ignored));
    }
  }

  DecodeOptions decode_;
  Labels labels_;
};

class SegmentationFolder : public MaskedImages {
 public:
  SegmentationFolder(const SegmentationFolderOptions& options, Split split)
      : MaskedImages("segmentation_folder", options, split,
                     {.classes = options.classes,
                      .names = options.class_names,
                      .ignored = static_cast<uint8_t>(options.ignore_index)}),
        images_(
            detail::of_split(split, options.train_images, options.val_images, options.test_images)),
        masks_(detail::of_split(split, options.train_masks, options.val_masks, options.test_masks)),
        pairs_(detail::index_pairs(images_, masks_, {.folder = options.cache_dir})) {}

  int64_t size() const override { return pairs_.size() / 2; }
  uint64_t fingerprint() const override { return pairs_.fingerprint(); }
  std::string unreadable() const override {
    return detail::unreadable_files(pairs_, [this](int64_t file) {
      return (file < size() ? images_ : masks_) / pairs_.file(file);
    });
  }

 private:
  fs::path image_file(int64_t index) const override { return images_ / pairs_.file(index); }
  fs::path mask_file(int64_t index) const override { return masks_ / pairs_.file(size() + index); }

  fs::path images_;
  fs::path masks_;
  detail::FolderIndex pairs_;  ///< all images, then all masks
};

const std::vector<std::string> kVocClasses = {
    "background", "aeroplane", "bicycle",     "bird",  "boat",        "bottle", "bus",
    "car",        "cat",       "chair",       "cow",   "diningtable", "dog",    "horse",
    "motorbike",  "person",    "pottedplant", "sheep", "sofa",        "train",  "tvmonitor"};

class VocSegmentation : public MaskedImages {
 public:
  /// @param list name of a list in ImageSets/Segmentation
  VocSegmentation(const VocSegmentationOptions& options, Split split, const std::string& list)
      : MaskedImages("voc_segmentation", options, split,
                     {.classes = std::ssize(kVocClasses), .names = kVocClasses}),
        folder_(folder_of(options)),
        names_(read_names(folder_ / "ImageSets/Segmentation" / (list + ".txt"))) {
    for (const std::string& name : names_) {
      if (base::is_within(folder_ / "JPEGImages", name)) continue;
      throw base::UserError(
          fmt::format("voc_segmentation: '{}', which is on the list '{}', leads out of "
                      "JPEGImages; name files without their folder",
                      base::printable(name), list));
    }
    for (int64_t i = 0; i < size(); ++i) {
      for (const fs::path& file : {image_file(i), mask_file(i)}) {
        if (base::exists(file)) {
          if (detail::is_empty_file(file)) empty_files_.push_back(file);
          continue;
        }
        throw base::UserError(
            fmt::format("voc_segmentation: '{}', which is on the list '{}', does not exist",
                        file.string(), list));
      }
    }
  }

  int64_t size() const override { return std::ssize(names_); }
  std::string unreadable() const override { return detail::empty_files_text(empty_files_); }
  uint64_t fingerprint() const override {
    base::Fnv1a hash;
    for (const std::string& name : names_) hash.add_bytes(name + '\0');
    return hash.value();
  }

 private:
  static fs::path folder_of(const VocSegmentationOptions& options) {
    const fs::path root = options.root;
    constexpr int64_t kDeeper = 2011;  // its archive has an extra folder
    return (options.year == kDeeper ? root / "TrainVal" : root) / "VOCdevkit" /
           fmt::format("VOC{}", options.year);
  }

  static std::vector<std::string> read_names(const fs::path& list) {
    std::string text;
    try {
      text = base::read_file(list);
    } catch (const base::UserError& error) {
      throw base::UserError(fmt::format(
          "voc_segmentation: {}; root is the folder that contains VOCdevkit", error.what()));
    }
    std::istringstream words(text);
    std::vector<std::string> names{std::istream_iterator<std::string>(words), {}};
    if (names.empty()) {
      throw base::UserError(fmt::format("voc_segmentation: '{}' has no names", list.string()));
    }
    return names;
  }

  fs::path image_file(int64_t index) const override {
    return folder_ / "JPEGImages" / (names_[static_cast<size_t>(index)] + ".jpg");
  }
  fs::path mask_file(int64_t index) const override {
    return folder_ / "SegmentationClass" / (names_[static_cast<size_t>(index)] + ".png");
  }

  fs::path folder_;
  std::vector<std::string> names_;
  std::vector<fs::path> empty_files_;
};

}  // namespace

void SegmentationFolderOptions::describe(config::Schema<SegmentationFolderOptions>& schema) {
  using Options = SegmentationFolderOptions;
  schema.field("train_images", &Options::train_images, "the folder of the images").required();
  schema
      .field("train_masks", &Options::train_masks,
             "the folder of their masks, PNGs of the same name")
      .required();
  schema.field("val_images", &Options::val_images,
               "the same for the validation split; empty: none");
  schema.field("val_masks", &Options::val_masks, "the same for the validation split; empty: none");
  schema.field("test_images", &Options::test_images, "the same for the test split; empty: none");
  schema.field("test_masks", &Options::test_masks, "the same for the test split; empty: none");
  schema.field("classes", &Options::classes, "labels are below this").required().between(1, 256);
  schema.field("class_names", &Options::class_names,
               "names of the classes, by label; empty: their numbers");
  schema.field("ignore_index", &Options::ignore_index, "label of pixels that are ignored")
      .between(0, 255);
  schema.refuse("val_images and val_masks go together", [](const Options& options) {
    return options.val_images.empty() != options.val_masks.empty();
  });
  schema.refuse("test_images and test_masks go together", [](const Options& options) {
    return options.test_images.empty() != options.test_masks.empty();
  });
  schema.check([](const Options& options) -> std::optional<std::string> {
    const auto& names = options.class_names;
    if (!names.empty() && std::ssize(names) != options.classes) {
      return fmt::format("class_names has {}, classes is {}", base::counted(names.size(), "name"),
                         options.classes);
    }
    if (std::set<std::string>(names.begin(), names.end()).size() == names.size()) {
      return std::nullopt;
    }
    return "class_names has a name twice";
  });
  detail::describe_image_files(schema);
}

std::shared_ptr<const Dataset> load_segmentation_folder(const SegmentationFolderOptions& options,
                                                        Split split) {
  if (detail::of_split(split, options.train_images, options.val_images, options.test_images)
          .empty()) {
    return nullptr;
  }
  return std::make_shared<const SegmentationFolder>(options, split);
}

void VocSegmentationOptions::describe(config::Schema<VocSegmentationOptions>& schema) {
  using Options = VocSegmentationOptions;
  constexpr int64_t kFirst = 2007, kLast = 2012;
  schema.field("root", &Options::root, "the folder that contains VOCdevkit").required();
  schema.field("year", &Options::year, "of the challenge").between(kFirst, kLast);
  schema.field("train", &Options::train,
               "the list of training images in ImageSets/Segmentation: train, trainval");
  schema.field("val", &Options::val, "the list of the validation split; empty: none");
  schema.field("test", &Options::test, "the list of the test split; empty: none");
  detail::describe_image_files(schema);
}

std::shared_ptr<const Dataset> load_voc_segmentation(const VocSegmentationOptions& options,
                                                     Split split) {
  const std::string& list = detail::of_split(split, options.train, options.val, options.test);
  if (list.empty()) return nullptr;
  return std::make_shared<const VocSegmentation>(options, split, list);
}

}  // namespace syncbn::data
