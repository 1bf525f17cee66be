// Data sets of image files with one label each: image folders, tar shards.
#include <fmt/format.h>

#include <algorithm>
#include <iterator>

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
      : ImageSetOf({"image_folder", options, split, {.max_pixels = options.max_pixels}}),
        root_(detail::of_split(split, options.train, options.val, options.test)),
        decode_(detail::decode_options(options)),
        index_(std::move(index)),
        classes_(std::ssize(index_.classes())) {}

  int64_t size() const override { return index_.size(); }
  std::span<const int64_t> labels() const override { return index_.labels(); }
  int64_t num_classes() const override { return classes_; }
  std::vector<std::string> class_names() const override { return index_.classes(); }
  /// A hash of all paths and the start of the first file: reading all files might take hours.
  uint64_t fingerprint() const override { return index_.fingerprint(); }
  std::string name_of(int64_t index) const override { return path_of(index).string(); }

  /// torchvision takes these files for images, so they are samples here as well.
  std::string unreadable() const override {
    return detail::unreadable_files(index_, [this](int64_t index) { return path_of(index); });
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
      : ImageSetOf({"tar_shards", options, split, {.max_pixels = options.max_pixels}}),
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

void TarShardsOptions::describe(config::Schema<TarShardsOptions>& schema) {
  schema.field("train", &TarShardsOptions::train, "the shards, such as train-{000000..000099}.tar")
      .required();
  schema.field("val", &TarShardsOptions::val, "the validation split's shards; empty: none");
  schema.field("test", &TarShardsOptions::test, "the test split's shards; empty: none");
  schema.field("classes", &TarShardsOptions::classes, "labels are below this")
      .required()
      .between(1, 1'000'000);
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
