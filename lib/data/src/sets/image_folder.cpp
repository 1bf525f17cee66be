#include <fmt/format.h>

#include <syncbn/base/error.h>

#include "sets/file_bytes.h"
#include "sets/folder_index.h"
#include "sets/image_set.h"

namespace syncbn::data {
namespace {

namespace fs = std::filesystem;

class ImageFolder : public detail::ImageSet {
 public:
  ImageFolder(const ImageFolderOptions& options, Split split, detail::FolderIndex index)
      : ImageSet("image_folder", options, split, /*channels=*/3, std::nullopt),
        root_(split == Split::kTest ? options.test : options.train),
        decode_(detail::decode_options(options)),
        index_(std::move(index)),
        classes_(std::ssize(index_.classes())) {}

  int64_t size() const override { return index_.size(); }
  std::span<const int64_t> labels() const override { return index_.labels(); }
  int64_t num_classes() const override { return classes_; }
  /// Of names and classes only: reading ten million files would take hours.
  uint64_t fingerprint() const override { return index_.fingerprint(); }
  std::string name_of(int64_t index) const override { return path_of(index).string(); }

  void read_sample(int64_t index, SampleRandom& random, const SampleSlot& slot) const override {
    const fs::path path = path_of(index);
    ImageDecoder decoder(detail::read_whole_file(path), path.string(), decode_);
    put(pipeline().run(decoder, random), slot.data);
    slot.target[0] = index_.labels()[static_cast<size_t>(index)];
  }

 private:
  fs::path path_of(int64_t index) const { return root_ / index_.file(index); }

  fs::path root_;
  DecodeOptions decode_;
  detail::FolderIndex index_;
  int64_t classes_;
};

}  // namespace

void ImageFolderOptions::describe(config::Schema<ImageFolderOptions>& schema) {
  schema.field("train", &ImageFolderOptions::train, "the folder of the class folders").required();
  schema
      .field("test", &ImageFolderOptions::test,
             "the same for the test split, with the same classes")
      .required();
  detail::describe_image_files(schema);
}

std::shared_ptr<const Dataset> load_image_folder(const ImageFolderOptions& options, Split split) {
  auto index = detail::index_class_folders(split == Split::kTest ? options.test : options.train,
                                           {.folder = options.cache_dir});
  // A label means the same in both splits only if the lists of classes are the same.
  if (split == Split::kTest && index.classes() != detail::class_names(options.train)) {
    throw base::UserError(
        fmt::format("image_folder: '{}' and '{}' do not have the same class folders", options.test,
                    options.train));
  }
  return std::make_shared<const ImageFolder>(options, split, std::move(index));
}

}  // namespace syncbn::data
