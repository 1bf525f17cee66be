#include <syncbn/data/unlabelled_images.h>

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include <syncbn/base/error.h>
#include <syncbn/base/hash.h>

#include "sets/file_bytes.h"
#include "sets/image_set.h"

namespace syncbn::data {
namespace {

namespace fs = std::filesystem;

std::vector<fs::path> images_below(const fs::path& folder) {
  std::vector<fs::path> files;
  std::error_code error;
  auto entry = fs::recursive_directory_iterator(
      folder, fs::directory_options::follow_directory_symlink, error);
  for (; !error && entry != fs::recursive_directory_iterator(); entry.increment(error)) {
    std::error_code ignored;
    const bool is_file = entry->is_regular_file(ignored);
    if (is_file && detail::is_decoded(entry->path().extension().string())) {
      files.push_back(entry->path().lexically_relative(folder));
    }
  }
  if (error) {
    throw base::UserError(
        fmt::format("cannot read the folder '{}': {}", folder.string(), error.message()));
  }
  std::ranges::sort(files);
  return files;
}

class UnlabelledSet : public detail::ImageSet {
 public:
  UnlabelledSet(const UnlabelledImagesOptions& options, std::vector<fs::path> files)
      : ImageSetOf({"images", options, Split::kTest, {.may_vary = true}}),
        options_(options),
        files_(std::move(files)) {}

  int64_t size() const override { return std::ssize(files_); }
  std::span<const int64_t> labels() const override { return {}; }
  int64_t num_classes() const override { return options_.classes; }
  std::vector<std::string> class_names() const override { return options_.class_names; }
  std::vector<int64_t> target_shape() const override {
    if (!options_.labels_pixels) return {};
    return {format().size().height, format().size().width};
  }
  std::string name_of(int64_t index) const override {
    return (fs::path(options_.images) / files_[static_cast<size_t>(index)]).string();
  }
  uint64_t fingerprint() const override {
    base::Fnv1a hash;
    for (const fs::path& file : files_) hash.add_bytes(file.string());
    return hash.value();
  }

  void read_sample(int64_t index, SampleRandom& random, const SampleSlot& slot) const override {
    ImageDecoder decoder = open(index);
    format().write(pipeline().run(decoder, random), slot);
    std::ranges::fill(slot.target, options_.labels_pixels ? ignore_index() : 0);
  }

  ImageSize original_size(int64_t index) const {
    const ImageDecoder decoder = open(index);
    return {decoder.width(), decoder.height()};
  }

 private:
  /// Valid until this thread reads the next file.
  ImageDecoder open(int64_t index) const {
    const std::string file = name_of(index);
    return {detail::read_whole_file(file), file, detail::decode_options(options_)};
  }

  const UnlabelledImagesOptions options_;
  const std::vector<fs::path> files_;
};

}  // namespace

void UnlabelledImagesOptions::describe(config::Schema<UnlabelledImagesOptions>& schema) {
  detail::describe_image_files(schema);
}

UnlabelledImages load_unlabelled_images(const UnlabelledImagesOptions& options) {
  UnlabelledImages made;
  made.files = images_below(options.images);
  if (made.files.empty()) {
    throw base::UserError(fmt::format("there are no JPEG or PNG files in '{}'", options.images));
  }
  made.are_whole = detail::first_but_resize(options.test_transforms) == nullptr;
  auto set = std::make_shared<const UnlabelledSet>(options, made.files);
  made.original_size = [set](int64_t index) { return set->original_size(index); };
  made.set = std::move(set);
  return made;
}

}  // namespace syncbn::data
