#include <syncbn/data/unlabelled_images.h>

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include <syncbn/base/error.h>
#include <syncbn/base/hash.h>
#include <syncbn/data/boxes.h>

#include "sets/file_bytes.h"
#include "sets/folder_index.h"
#include "sets/image_set.h"

namespace syncbn::data {
namespace {

namespace fs = std::filesystem;

/// `Base` is SampleDataset or BoxDataset.
template <class Base>
class UnlabelledSet : public detail::ImageFilesOf<Base> {
 public:
  UnlabelledSet(const UnlabelledImagesOptions& options, std::vector<fs::path> files)
      : detail::ImageFilesOf<Base>("images", options, Split::kTest,
                                   {.may_vary = true, .max_pixels = options.max_pixels}),
        options_(options),
        files_(std::move(files)) {}

  int64_t size() const override { return std::ssize(files_); }
  std::span<const int64_t> labels() const override { return {}; }
  int64_t num_classes() const override { return options_.classes; }
  std::vector<std::string> class_names() const override { return options_.class_names; }
  std::vector<int64_t> target_shape() const override {
    if (!options_.labels_pixels) return {};
    return {this->format().size().height, this->format().size().width};
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
    ImageDecoder decoder = this->open(index);
    this->format().write(this->pipeline().run(decoder, random), slot);
    std::ranges::fill(slot.target, options_.labels_pixels ? this->ignore_index() : 0);
  }

  ImageSize size_of(int64_t index) const {
    const ImageDecoder decoder = this->open(index);
    return {decoder.width(), decoder.height()};
  }

 protected:
  const UnlabelledImagesOptions& options() const { return options_; }

 private:
  const UnlabelledImagesOptions options_;
  const std::vector<fs::path> files_;
};

class UnlabelledBoxSet : public UnlabelledSet<BoxDataset> {
 public:
  using UnlabelledSet::UnlabelledSet;
  std::span<const Annotation> annotations(int64_t /*index*/) const override { return {}; }
  int64_t image_id(int64_t index) const override { return index; }
  int64_t category_id(int64_t label) const override {
    return options().category_ids[static_cast<size_t>(label)];
  }
  ImageSize original_size(int64_t index) const override { return size_of(index); }
};

}  // namespace

void UnlabelledImagesOptions::describe(config::Schema<UnlabelledImagesOptions>& schema) {
  detail::describe_image_files(schema);
}

UnlabelledImages load_unlabelled_images(UnlabelledImagesOptions options) {
  UnlabelledImages made;
  const fs::path images = options.images;
  std::error_code ignored;
  if (fs::is_regular_file(images, ignored)) {
    made.files = {images.filename()};
    options.images = images.parent_path().string();
  } else if (!images.empty()) {
    detail::FileCounts others;
    made.files = detail::images_below(images, others);
    made.num_others = others.count();
    made.others = others.text();
    if (made.files.empty()) {
      throw base::UserError(fmt::format("there are no JPEG or PNG files in '{}'{}", options.images,
                                        made.others.empty() ? "" : ", but " + made.others));
    }
  }
  made.are_whole = detail::first_but_resize(options.test_transforms) == nullptr;
  const auto take = [&](const auto& set) {
    made.original_size = [set](int64_t index) { return set->size_of(index); };
    made.set = set;
  };
  if (options.category_ids.empty()) {
    take(std::make_shared<const UnlabelledSet<SampleDataset>>(options, made.files));
  } else {
    take(std::make_shared<const UnlabelledBoxSet>(options, made.files));
  }
  return made;
}

}  // namespace syncbn::data
