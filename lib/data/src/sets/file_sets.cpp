// Data sets of files that are decoded: image folders, segmentation folders, tar shards.
#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <set>

#include <syncbn/base/error.h>
#include <syncbn/base/text.h>

#include "sets/file_bytes.h"
#include "sets/folder_index.h"
#include "sets/image_set.h"
#include "sets/shard_index.h"

namespace syncbn::data {
namespace {

namespace fs = std::filesystem;

/// "; only in 'photos/test': dog, fox", or "".
std::string only_in(const std::string& folder, const std::vector<std::string>& classes,
                    const std::vector<std::string>& others) {
  constexpr size_t kShown = 5;
  std::vector<std::string> own;
  std::ranges::set_difference(classes, others, std::back_inserter(own));
  if (own.empty()) return "";
  const bool is_long = own.size() > kShown;
  own.resize(std::min(own.size(), kShown));
  return fmt::format("; only in '{}': {}{}", folder, base::join(own, ", "), is_long ? " …" : "");
}

class ImageFolder : public detail::ImageSet {
 public:
  ImageFolder(const ImageFolderOptions& options, Split split, detail::FolderIndex index)
      : ImageSetOf({"image_folder", options, split, {}}),
        root_(detail::of_split(split, options.train, options.val, options.test)),
        decode_(detail::decode_options(options)),
        index_(std::move(index)),
        classes_(std::ssize(index_.classes())) {}

  int64_t size() const override { return index_.size(); }
  std::span<const int64_t> labels() const override { return index_.labels(); }
  int64_t num_classes() const override { return classes_; }
  std::vector<std::string> class_names() const override { return index_.classes(); }
  /// Of names and classes only: reading ten million files would take hours.
  uint64_t fingerprint() const override { return index_.fingerprint(); }
  std::string name_of(int64_t index) const override { return path_of(index).string(); }

  /// torchvision takes these files for images, and they are samples here as well.
  std::string unreadable() const override {
    std::set<std::string> kinds;
    int64_t files = 0;
    std::string first;
    for (int64_t i = 0; i < size(); ++i) {
      const std::string name = index_.file(i);
      const std::string kind = name.substr(std::min(name.rfind('.'), name.size()));
      if (detail::is_decoded(kind)) continue;
      if (files++ == 0) first = name_of(i);
      kinds.insert(kind);
    }
    if (files == 0) return {};
    return fmt::format("{} ({}), such as '{}'", base::counted(files, "file"),
                       base::join({kinds.begin(), kinds.end()}, ", "), first);
  }

  void read_sample(int64_t index, SampleRandom& random, const SampleSlot& slot) const override {
    const fs::path path = path_of(index);
    ImageDecoder decoder(detail::read_whole_file(path), path.string(), decode_);
    format().write(pipeline().run(decoder, random), slot);
    slot.target[0] = index_.labels()[static_cast<size_t>(index)];
  }

 private:
  fs::path path_of(int64_t index) const { return root_ / index_.file(index); }

  fs::path root_;
  DecodeOptions decode_;
  detail::FolderIndex index_;
  int64_t classes_;
};

class SegmentationFolder : public detail::ImageSet {
 public:
  SegmentationFolder(const SegmentationFolderOptions& options, Split split)
      : ImageSetOf({"segmentation_folder", options, split, {.may_vary = true}}),
        images_(
            detail::of_split(split, options.train_images, options.val_images, options.test_images)),
        masks_(detail::of_split(split, options.train_masks, options.val_masks, options.test_masks)),
        decode_(detail::decode_options(options)),
        classes_(options.classes),
        class_names_(options.class_names),
        ignored_(static_cast<uint8_t>(options.ignore_index)),
        pairs_(detail::index_pairs(images_, masks_, {.folder = options.cache_dir})) {}

  int64_t size() const override { return pairs_.size() / 2; }
  std::span<const int64_t> labels() const override { return {}; }
  int64_t num_classes() const override { return classes_; }
  std::vector<std::string> class_names() const override { return class_names_; }
  int64_t ignore_index() const override { return ignored_; }
  std::vector<int64_t> target_shape() const override {
    return {format().size().height, format().size().width};
  }
  std::string name_of(int64_t index) const override {
    return (images_ / pairs_.file(index)).string();
  }

  uint64_t fingerprint() const override { return pairs_.fingerprint(); }

  void read_sample(int64_t index, SampleRandom& random, const SampleSlot& slot) const override {
    ImageSample sample;
    sample.ignored_label = ignored_;
    const std::string image_file = name_of(index);
    sample.image = ImageDecoder(detail::read_whole_file(image_file), image_file, decode_).decode();
    const fs::path mask_file = masks_ / pairs_.file(size() + index);
    sample.mask =
        ImageDecoder(detail::read_whole_file(mask_file), mask_file.string(), decode_).decode_mask();
    check(sample, mask_file);
    sample = pipeline().run(std::move(sample), random);
    format().write(sample.image, slot);
    format().write_mask(*sample.mask, slot);
  }

 private:
  void check(const ImageSample& sample, const fs::path& mask_file) const {
    const Image& mask = *sample.mask;
    if (mask.width != sample.image.width || mask.height != sample.image.height) {
      throw base::UserError(fmt::format("the mask '{}' has {} x {} pixels, its image {} x {}",
                                        mask_file.string(), mask.width, mask.height,
                                        sample.image.width, sample.image.height));
    }
    for (const uint8_t label : mask.pixels) {
      if (label < classes_ || label == ignored_) continue;
      throw base::UserError(fmt::format(
          "the mask '{}' has the label {}; labels are below {}, or {} for ignored pixels",
          mask_file.string(), label, classes_, ignored_));
    }
  }

  fs::path images_;
  fs::path masks_;
  DecodeOptions decode_;
  int64_t classes_;
  std::vector<std::string> class_names_;
  uint8_t ignored_;
  detail::FolderIndex pairs_;  ///< all images, then all masks
};

std::vector<detail::OpenFiles::Named> with_stamps(const std::vector<fs::path>& paths,
                                                  std::span<const detail::FileStamp> stamps) {
  std::vector<detail::OpenFiles::Named> shards;
  shards.reserve(paths.size());
  for (size_t i = 0; i < paths.size(); ++i) shards.push_back({paths[i], stamps[i]});
  return shards;
}

class TarShards : public detail::ImageSet {
 public:
  TarShards(const TarShardsOptions& options, Split split, const std::vector<fs::path>& paths,
            detail::ShardIndex index)
      : ImageSetOf({"tar_shards", options, split, {}}),
        decode_(detail::decode_options(options)),
        classes_(options.classes),
        index_(std::move(index)),
        shards_(with_stamps(paths, index_.stamps())) {}

  int64_t size() const override { return index_.size(); }
  std::span<const int64_t> labels() const override { return index_.labels(); }
  int64_t num_classes() const override { return classes_; }

  std::span<const int64_t> shard_ends() const override { return index_.shard_ends(); }
  uint64_t fingerprint() const override { return index_.fingerprint(); }

  std::string name_of(int64_t index) const override {
    const auto& place = index_[index];
    return fmt::format("{} at byte {}", shards_.path(place.shard).string(), place.offset);
  }

  void read_sample(int64_t index, SampleRandom& random, const SampleSlot& slot) const override {
    auto& bytes = detail::thread_buffer();
    const auto& place = index_[index];
    const auto shard = shards_.open(place.shard);
    detail::read_at(*shard, shards_.path(place.shard), static_cast<int64_t>(place.offset),
                    place.size, bytes);
    ImageDecoder decoder(bytes, name_of(index), decode_);
    format().write(pipeline().run(decoder, random), slot);
    slot.target[0] = index_.labels()[static_cast<size_t>(index)];
  }

  void prefetch(std::span<const int64_t> indices) const override {
    for (const auto& [shard, offset, size] : index_.ranges(indices)) {
      try {
        detail::read_ahead(*shards_.open(shard), offset, size);
      } catch (const base::Error&) {
        // read_sample() reports it with the sample's name.
      }
    }
  }

 private:
  DecodeOptions decode_;
  int64_t classes_;
  detail::ShardIndex index_;
  detail::OpenFiles shards_;
};

}  // namespace

void ImageFolderOptions::describe(config::Schema<ImageFolderOptions>& schema) {
  schema.field("train", &ImageFolderOptions::train, "the folder of the class folders").required();
  schema.field("val", &ImageFolderOptions::val,
               "the same for the validation split, with the same classes; empty: none");
  schema.field("test", &ImageFolderOptions::test, "the same for the test split; empty: none");
  detail::describe_image_files(schema);
}

std::shared_ptr<const Dataset> load_image_folder(const ImageFolderOptions& options, Split split) {
  const std::string& root = detail::of_split(split, options.train, options.val, options.test);
  if (root.empty()) return nullptr;
  auto index = detail::index_class_folders(root, {.folder = options.cache_dir});
  if (root != options.train) {
    // A label means the same in both splits only if the lists of classes are the same.
    const std::vector<std::string> trained = detail::class_names(options.train);
    if (index.classes() != trained) {
      throw base::UserError(
          fmt::format("image_folder: '{}' and '{}' need the same class folders{}{}", root,
                      options.train, only_in(root, index.classes(), trained),
                      only_in(options.train, trained, index.classes())));
    }
  }
  return std::make_shared<const ImageFolder>(options, split, std::move(index));
}

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
  schema.field("classes", &Options::classes, "labels are below this")
      .required()
      .at_least(1)
      .at_most(256);
  schema.field("class_names", &Options::class_names,
               "names of the classes, by label; empty: their numbers");
  schema.field("ignore_index", &Options::ignore_index, "label of pixels that are ignored")
      .at_least(0)
      .at_most(255);
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

void TarShardsOptions::describe(config::Schema<TarShardsOptions>& schema) {
  schema.field("train", &TarShardsOptions::train, "the shards, such as train-{000000..000099}.tar")
      .required();
  schema.field("val", &TarShardsOptions::val, "the validation split's shards; empty: none");
  schema.field("test", &TarShardsOptions::test, "the test split's shards; empty: none");
  schema.field("classes", &TarShardsOptions::classes, "labels are below this")
      .required()
      .at_least(1)
      .at_most(1'000'000);
  detail::describe_image_files(schema);
}

std::shared_ptr<const Dataset> load_tar_shards(const TarShardsOptions& options, Split split) {
  const std::string& pattern = detail::of_split(split, options.train, options.val, options.test);
  if (pattern.empty()) return nullptr;
  std::vector<fs::path> paths;
  for (const std::string& name : detail::expand_braces(pattern)) paths.emplace_back(name);
  auto index = detail::index_shards(paths, options.classes, pattern, {.folder = options.cache_dir});
  return std::make_shared<const TarShards>(options, split, paths, std::move(index));
}

}  // namespace syncbn::data
