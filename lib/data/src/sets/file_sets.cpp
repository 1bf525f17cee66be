// Data sets of image files with one label each: image folders, tar shards.
#include <fmt/format.h>

#include <syncbn/base/error.h>

#include "sets/file_bytes.h"
#include "sets/folder_index.h"
#include "sets/image_set.h"
#include "sets/shard_index.h"

namespace syncbn::data {
namespace {

namespace fs = std::filesystem;

class ImageFolder : public detail::ImageFiles {
 public:
  ImageFolder(const ImageFolderOptions& options, Split split, detail::FolderIndex index)
      : ImageFilesOf("image_folder", options, split, {.max_pixels = options.max_pixels}),
        root_(detail::of_split(split, options.train, options.val, options.test)),
        index_(std::move(index)),
        classes_(std::ssize(index_.classes())) {
    set_remarks(detail::remarks_on(index_, fmt::format("image_folder: '{}'", root_.string()),
                                   [this](int64_t file) { return root_ / index_.file(file); }));
  }

  int64_t size() const override { return index_.size(); }
  std::span<const int64_t> labels() const override { return index_.labels(); }
  int64_t num_classes() const override { return classes_; }
  std::vector<std::string> class_names() const override { return index_.classes(); }
  /// A hash of all paths and the start of the first file: reading all files might take hours.
  uint64_t fingerprint() const override { return index_.fingerprint(); }
  std::string name_of(int64_t index) const override {
    return (root_ / index_.file(index)).string();
  }

 private:
  fs::path root_;
  detail::FolderIndex index_;
  int64_t classes_;
};

class TarShards : public detail::ImageFiles {
 public:
  TarShards(const TarShardsOptions& options, Split split,
            std::vector<detail::OpenFiles::Named> shards, detail::ShardIndex index)
      : ImageFilesOf("tar_shards", options, split, {.max_pixels = options.max_pixels}),
        classes_(options.classes),
        index_(std::move(index)),
        shards_(std::move(shards)) {
    const auto& pattern = detail::of_split(split, options.train, options.val, options.test);
    const std::string where = fmt::format("tar_shards: '{}': ", pattern);
    std::vector<Remark> remarks;
    detail::add_remark(remarks, where + "left out", index_.left_out(), detail::kSampleRule);
    detail::add_remark(remarks, where + "shards without the closing blocks of a tar file",
                       index_.unclosed(),
                       "they may be cut short; compare their sizes with those of the originals");
    set_remarks(std::move(remarks));
  }

  int64_t size() const override { return index_.size(); }
  std::span<const int64_t> labels() const override { return index_.labels(); }
  int64_t num_classes() const override { return classes_; }

  std::span<const int64_t> shard_ends() const override { return index_.shard_ends(); }
  uint64_t fingerprint() const override { return index_.fingerprint(); }

  std::string name_of(int64_t index) const override {
    const auto& place = index_[index];
    return fmt::format("{} at byte {}", shards_.path(place.shard).string(), place.offset);
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
  ImageDecoder open(int64_t index) const override {
    auto& bytes = detail::thread_buffer();
    const auto& place = index_[index];
    const auto shard = shards_.open(place.shard);
    detail::read_at(*shard, shards_.path(place.shard), static_cast<int64_t>(place.offset),
                    place.size, bytes);
    return {bytes, name_of(index), decode()};
  }

  int64_t classes_;
  detail::ShardIndex index_;
  detail::OpenFiles shards_;
};

}  // namespace

void ImageFolderOptions::describe(config::Schema<ImageFolderOptions>& schema) {
  schema.field("train", &ImageFolderOptions::train, "the folder of the class folders").required();
  schema.field("val", &ImageFolderOptions::val,
               "the same for the validation split, which may lack classes; empty: none");
  schema.field("test", &ImageFolderOptions::test, "the same for the test split; empty: none");
  detail::describe_image_files(schema);
}

std::shared_ptr<const Dataset> load_image_folder(const ImageFolderOptions& options, Split split) {
  const std::string& root = detail::of_split(split, options.train, options.val, options.test);
  if (root.empty()) return nullptr;
  std::vector<std::string> trained;
  if (root != options.train) {
    trained = detail::class_names(options.train);
    const auto own = detail::class_names(root);
    detail::check_classes(fmt::format("image_folder: '{}' has class folders", root),
                          {own.begin(), own.end()}, options.train,
                          {trained.begin(), trained.end()});
  }
  auto index = detail::index_class_folders(root, {.folder = options.cache_dir}, trained);
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
  std::vector<detail::OpenFiles::Named> shards;
  for (size_t i = 0; i < paths.size(); ++i) shards.push_back({paths[i], index.stamps()[i]});
  return std::make_shared<const TarShards>(options, split, std::move(shards), std::move(index));
}

}  // namespace syncbn::data
