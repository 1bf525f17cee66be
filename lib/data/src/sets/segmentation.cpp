// Data sets of images with masks, which hold the label of each pixel.
#include <fmt/ranges.h>

#include <array>
#include <bitset>
#include <iterator>
#include <set>
#include <sstream>

#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/base/hash.h>
#include <syncbn/base/open_file.h>
#include <syncbn/base/text.h>

#include "image/orientation.h"
#include "sets/file_bytes.h"
#include "sets/folder_index.h"
#include "sets/image_set.h"

namespace syncbn::data {
namespace {

namespace fs = std::filesystem;

/// Reads pairs of an image file, name_of(), and a mask file.
class MaskedImages : public detail::ImageFiles {
 public:
  static constexpr uint8_t kIgnored = 255;

  struct Labels {
    int64_t classes = 0;
    std::vector<std::string> names = {};  ///< by label; empty: none
    std::vector<int64_t> values = {};     ///< in the masks, by label; empty: the labels
    int64_t ignored_value = kIgnored;     ///< in the masks
  };

  std::span<const int64_t> labels() const override { return {}; }
  int64_t num_classes() const override { return labels_.classes; }
  std::vector<std::string> class_names() const override { return labels_.names; }
  /// With `values`, the ignored one may be a label.
  int64_t ignore_index() const override {
    return labels_.values.empty() ? labels_.ignored_value : kIgnored;
  }
  std::vector<int64_t> target_shape() const override {
    return {format().size().height, format().size().width};
  }

  void read_sample(int64_t index, SampleRandom& random, const SampleSlot& slot) const override {
    ImageSample sample;
    sample.ignored_label = static_cast<uint8_t>(ignore_index());
    sample.image = open(index).decode();
    sample.mask = read_mask(index);
    check_sizes(sample, index);
    sample = pipeline().run(std::move(sample), random);
    format().write(sample.image, slot);
    format().write_mask(*sample.mask, slot);
  }

  SampleFacts facts(int64_t index) const override {
    SampleFacts facts = ImageFilesOf::facts(index);
    facts.labels.emplace();
    for (const uint8_t label : read_mask(index).pixels) facts.labels->set(label);
    return facts;
  }

 protected:
  MaskedImages(const std::string& kind, const ImageFileOptions& options, Split split, Labels labels)
      : ImageFilesOf(kind, options, split, {.may_vary = true, .max_pixels = options.max_pixels}),
        labels_(std::move(labels)) {
    label_of_[static_cast<size_t>(labels_.ignored_value)] = static_cast<uint8_t>(ignore_index());
    for (size_t label = 0; label < static_cast<size_t>(labels_.classes); ++label) {
      const auto value =
          labels_.values.empty() ? label : static_cast<size_t>(labels_.values[label]);
      label_of_[value] = static_cast<uint8_t>(label);
    }
  }

  virtual fs::path mask_file(int64_t index) const = 0;

 private:
  void check_sizes(const ImageSample& sample, int64_t index) const {
    const Image& mask = *sample.mask;
    if (mask.width == sample.image.width && mask.height == sample.image.height) return;
    const int orientation = open(index).file_orientation();
    const bool fits_turned = detail::swaps_sides(orientation) &&
                             mask.width == sample.image.height && mask.height == sample.image.width;
    throw base::UserError(fmt::format(
        "the mask '{}' has {} x {} pixels, its image {} x {}{}", mask_file(index).string(),
        mask.width, mask.height, sample.image.width, sample.image.height,
        !fits_turned ? ""
                     : fmt::format("; the image is stored rotated (EXIF orientation {}): set "
                                   "data.exif_orientation={}",
                                   orientation, !decode().exif_orientation)));
  }

  /// The labels of the pixels. If 255 is a class and 1 is none, greys of fewer bits than 8 are
  /// scaled.
  Image read_mask(int64_t index) const {
    const std::string file = mask_file(index).string();
    DecodeOptions options = decode();
    options.scale_labels =
        std::ranges::count(labels_.values, 255) > 0 && std::ranges::count(labels_.values, 1) == 0;
    Image mask = ImageDecoder(detail::read_whole_file(file), file, options).decode_mask();
    std::bitset<256> unknown;
    for (uint8_t& value : mask.pixels) {
      if (!label_of_[value]) unknown.set(value);
      value = label_of_[value].value_or(0);
    }
    if (unknown.any()) refuse_values(file, unknown);
    return mask;
  }

  [[noreturn]] void refuse_values(const std::string& file, const std::bitset<256>& unknown) const {
    constexpr size_t kShown = 8;
    std::vector<std::string> values;
    for (size_t value = 0; value < unknown.size(); ++value) {
      if (unknown.test(value)) values.push_back(std::to_string(value));
    }
    const bool is_class = std::ranges::count(labels_.values, labels_.ignored_value) > 0;
    throw base::UserError(fmt::format(
        "the mask '{}' has the label{} {}; {}{}; list the value of each class in data.mask_values "
        "of a segmentation_folder, or save the mask without others (JPEG and smooth resizing make "
        "values in between; the values of a palette PNG are indices, whatever its colours)",
        file, values.size() == 1 ? "" : "s", base::join_some(values, ", ", kShown),
        labels_.values.empty()
            ? fmt::format("labels are below {}", labels_.classes)
            : fmt::format("data.mask_values has {}", fmt::join(labels_.values, ", ")),
        is_class ? "" : fmt::format(", or {} for ignored pixels", labels_.ignored_value)));
  }

  Labels labels_;
  std::array<std::optional<uint8_t>, 256> label_of_;  ///< by value in a mask
};

class SegmentationFolder : public MaskedImages {
 public:
  SegmentationFolder(const SegmentationFolderOptions& options, Split split)
      : MaskedImages("segmentation_folder", options, split,
                     {.classes = options.classes,
                      .names = options.class_names,
                      .values = options.mask_values,
                      .ignored_value = options.ignore_index}),
        images_(
            detail::of_split(split, options.train_images, options.val_images, options.test_images)),
        masks_(detail::of_split(split, options.train_masks, options.val_masks, options.test_masks)),
        pairs_(detail::index_pairs(images_, masks_, {.folder = options.cache_dir})) {
    set_remarks(detail::remarks_on(
        pairs_, fmt::format("segmentation_folder: '{}'", images_.string()), [this](int64_t file) {
          return (file < pairs_.size() / 2 ? images_ : masks_) / pairs_.file(file);
        }));
  }

  int64_t size() const override { return pairs_.size() / 2; }
  std::string name_of(int64_t index) const override {
    return (images_ / pairs_.file(index)).string();
  }
  uint64_t fingerprint() const override { return pairs_.fingerprint(); }

 private:
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
    UnreadableFiles empty;
    std::vector<std::string> missing;
    for (int64_t i = 0; i < size(); ++i) {
      const std::string& name = names_[static_cast<size_t>(i)];
      if (!base::is_within(folder_ / "JPEGImages", name)) {
        throw base::UserError(
            fmt::format("voc_segmentation: '{}', which is on the list '{}', leads out of "
                        "JPEGImages; name files without their folder",
                        base::printable(name), list));
      }
      for (const fs::path& file : {fs::path(name_of(i)), mask_file(i)}) {
        if (!base::exists(file)) {
          const std::string link = base::dangling_link(file);
          missing.push_back(base::printable(file.lexically_relative(folder_).string()) +
                            (link.empty() ? "" : " (" + link + ")"));
        } else if (detail::is_empty_file(file)) {
          empty[file.string()] = kEmptyFile;
        }
      }
    }
    detail::refuse_missing(fmt::format("voc_segmentation: no file in '{}'", folder_.string()),
                           missing,
                           fmt::format("{} photos and masks of the list '{}'", 2 * size(), list),
                           "add the files, or remove their names from the list");
    set_remarks(detail::unreadable_remark(empty));
  }

  int64_t size() const override { return std::ssize(names_); }
  std::string name_of(int64_t index) const override {
    return folder_ / "JPEGImages" / (names_[static_cast<size_t>(index)] + ".jpg");
  }
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

  fs::path mask_file(int64_t index) const override {
    return folder_ / "SegmentationClass" / (names_[static_cast<size_t>(index)] + ".png");
  }

  fs::path folder_;
  std::vector<std::string> names_;
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
  schema
      .field("mask_values", &Options::mask_values,
             "values of the classes in the masks, by label, such as [0, 255]; empty: 0, 1, 2, ...")
      .between(0, 255);
  schema.refuse("val_images and val_masks go together", [](const Options& options) {
    return options.val_images.empty() != options.val_masks.empty();
  });
  schema.refuse("test_images and test_masks go together", [](const Options& options) {
    return options.test_images.empty() != options.test_masks.empty();
  });
  schema.check([](const Options& options) -> std::optional<std::string> {
    const auto& names = options.class_names;
    const auto& values = options.mask_values;
    const auto different = std::ssize(std::set<int64_t>(values.begin(), values.end()));
    if (!values.empty() && (different != options.classes || different != std::ssize(values))) {
      return "mask_values needs another value for each of the classes";
    }
    if (options.ignore_index != SegmentationFolderOptions().ignore_index &&
        std::ranges::count(values, options.ignore_index) > 0) {
      return "ignore_index is one of mask_values; give ignored pixels a value of their own";
    }
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
