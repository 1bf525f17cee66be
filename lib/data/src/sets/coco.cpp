#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <unordered_set>

#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/base/hash.h>
#include <syncbn/base/log.h>
#include <syncbn/base/open_file.h>
#include <syncbn/base/text.h>
#include <syncbn/data/boxes.h>

#include "image/orientation.h"
#include "sets/coco_instances.h"
#include "sets/file_bytes.h"
#include "sets/image_set.h"

namespace syncbn::data {
namespace {

namespace fs = std::filesystem;
using detail::CocoInstances;

LabelledBox clipped(const Annotation& box, ImageSize size) {
  const auto width = static_cast<double>(size.width);
  const auto height = static_cast<double>(size.height);
  return {.x1 = std::clamp(box.x, 0.0, width),
          .y1 = std::clamp(box.y, 0.0, height),
          .x2 = std::clamp(box.x + box.width, 0.0, width),
          .y2 = std::clamp(box.y + box.height, 0.0, height),
          .label = box.label};
}

detail::ImageFormat::Source source_of(const CocoInstances& instances, int64_t max_pixels) {
  detail::ImageFormat::Source source{.may_vary = true, .has_boxes = true, .max_pixels = max_pixels};
  ImageSize largest, smallest = instances.photos.front().size;
  for (const auto& photo : instances.photos) {
    if (photo.size.width > max_pixels / photo.size.height) continue;  // it will not be decoded
    largest = {std::max(largest.width, photo.size.width),
               std::max(largest.height, photo.size.height)};
    smallest = {std::min(smallest.width, photo.size.width),
                std::min(smallest.height, photo.size.height)};
  }
  source.max_size = largest;
  if (smallest == largest) source.size = largest;
  return source;
}

class Coco : public detail::ImageFilesOf<BoxDataset> {
 public:
  Coco(const CocoOptions& options, Split split, fs::path images, CocoInstances instances)
      : ImageFilesOf("coco", options, split, source_of(instances, options.max_pixels)),
        images_(std::move(images)),
        instances_(std::move(instances)) {
    for (const auto& photo : instances_.photos) {
      max_boxes_ = std::max(max_boxes_, std::ranges::count_if(instances_.of(photo), is_target));
    }
    fingerprint_ = hash();
    set_remarks(std::move(instances_.remarks));
  }

  int64_t size() const override { return std::ssize(instances_.photos); }
  std::span<const int64_t> labels() const override { return {}; }
  int64_t num_classes() const override { return std::ssize(instances_.classes); }
  std::vector<std::string> class_names() const override { return instances_.classes; }
  /// A hash of the annotations and the files' names.
  uint64_t fingerprint() const override { return fingerprint_; }
  std::vector<int64_t> target_shape() const override {
    return {1 + max_boxes_, BoxTarget::kColumns};
  }
  std::string name_of(int64_t index) const override {
    return (images_ / photo(index).file).string();
  }

  std::span<const Annotation> annotations(int64_t index) const override {
    return instances_.of(photo(index));
  }
  int64_t image_id(int64_t index) const override { return photo(index).id; }
  int64_t category_id(int64_t label) const override {
    return instances_.class_ids[static_cast<size_t>(label)];
  }
  ImageSize original_size(int64_t index) const override { return photo(index).size; }

  /// Counts photos as rotated only if their size does not tell whether to turn them.
  SampleFacts facts(int64_t index) const override {
    SampleFacts facts = ImageFilesOf::facts(index);
    const auto [width, height] = original_size(index);
    if (detail::swaps_sides(facts.orientation) && width != height) facts.orientation = 1;
    return facts;
  }

  void read_sample(int64_t index, SampleRandom& random, const SampleSlot& slot) const override {
    const ImageSize size = original_size(index);
    ImageSample sample{.image = open(index).decode()};
    for (const Annotation& annotation : annotations(index)) {
      if (is_target(annotation)) sample.boxes.push_back(clipped(annotation, size));
    }
    sample = pipeline().run(std::move(sample), random);
    format().write(sample.image, slot);
    BoxTarget::encode(slot.target, index, size, sample);
  }

 private:
  const CocoInstances::Photo& photo(int64_t index) const {
    return instances_.photos[static_cast<size_t>(index)];
  }

  /// Turns the photo as its EXIF orientation asks, or not, whatever the option says, if only then
  /// it has the size in its annotations.
  ImageDecoder open(int64_t index) const override {
    const ImageSize wanted = original_size(index);
    ImageDecoder decoder = ImageFilesOf::open(index);
    if (decoder.width() == wanted.width && decoder.height() == wanted.height) return decoder;
    DecodeOptions options = decode();
    options.exif_orientation = !options.exif_orientation;
    ImageDecoder other(detail::thread_buffer(), name_of(index), options);
    if (other.width() == wanted.width && other.height() == wanted.height) return other;
    throw base::UserError(fmt::format("'{}' has {} x {} pixels, its annotations are for {} x {}",
                                      name_of(index), decoder.width(), decoder.height(),
                                      wanted.width, wanted.height));
  }

  uint64_t hash() const {
    base::Fnv1a hash;
    for (const std::string& name : instances_.classes) hash.add_bytes(name + '\0');
    for (const auto& photo : instances_.photos) {
      hash.add_bytes(photo.file);
      hash.add(static_cast<uint64_t>(photo.id));
      hash.add(photo.count);
    }
    for (const Annotation& box : instances_.annotations) {
      hash.add(static_cast<uint64_t>(box.label));
      hash.add_byte(box.is_crowd ? 1 : 0);
      for (const double value : {box.x, box.y, box.width, box.height, box.area}) {
        hash.add(std::bit_cast<uint64_t>(value));
      }
    }
    return hash.value();
  }

  fs::path images_;
  CocoInstances instances_;
  int64_t max_boxes_ = 0;
  uint64_t fingerprint_ = 0;
};

/// Advice on a missing photo: the folder of its file (one below `images`, or the one above it if
/// the photo's name begins with the folder's own name), or a file of the same name there or in
/// `images`, perhaps with another ending. Names may be URLs or paths on another machine.
std::string advice_on(const fs::path& images, const fs::path& file, bool are_most_missing) {
  std::error_code ignored;
  std::vector<fs::path> folders = {images};
  for ([[maybe_unused]] const auto& part : file.parent_path()) folders.front() /= "..";
  for (const auto& entry : fs::directory_iterator(images, ignored)) {
    if (entry.is_directory(ignored)) folders.push_back(entry.path());
  }
  const auto found = std::ranges::find_if(
      folders, [&](const fs::path& folder) { return base::exists(folder / file); });
  const fs::path folder = (found != folders.end() ? *found : images).lexically_normal();
  const std::string question = fmt::format("is '{}' the folder of its images?", folder.string());
  if (found != folders.end() && are_most_missing) return question;
  for (const fs::path& at : {(folder / file).parent_path(), images}) {
    for (const auto& entry : fs::directory_iterator(at, ignored)) {
      const std::string other = entry.path();
      if (entry.path().stem() == file.stem() &&
          detail::kind_of(other) == detail::NameKind::kDecoded)
        return fmt::format("there is '{}': correct the file_names, paths below '{}'", other,
                           images.string());
    }
  }
  return are_most_missing ? question + " Each file_name is a path below it, with / between folders"
                          : "put the file there, or take the image out of the annotations";
}

/// Looks for the files of all photos. A name with backslashes is used as written if there is such a
/// file; otherwise backslashes are read as slashes.
/// @throws base::UserError for names that lead out of the folder, and if there is no file at all
void find_files(CocoInstances& instances, const fs::path& images, const std::string& annotations) {
  // A file server lists a folder sooner than it answers for each file.
  std::unordered_set<std::string> folders, listed;
  const auto has = [&](const fs::path& file) {
    std::error_code ignored;
    fs::directory_iterator entries;
    if (folders.insert(file.parent_path()).second) entries = {file.parent_path(), ignored};
    for (const auto& entry : entries) listed.insert(entry.path());
    return listed.contains(file) || base::exists(file);
  };
  size_t missing = 0;
  UnreadableFiles unreadable;
  const CocoInstances::Photo* first = nullptr;  // the first missing one
  for (auto& photo : instances.photos) {
    const std::string& written = photo.file_name();
    if (photo.file == "." || !base::is_within(images, photo.file)) {
      const std::string advice = advice_on(images, fs::path(photo.file).filename(), false);
      throw base::UserError(fmt::format(
          "coco: '{}': the file_name of image {}, '{}', is not within '{}', the folder of its "
          "images; name a folder that holds all of them{}",
          annotations, photo.id, base::printable(written), images.string(),
          advice.starts_with("there is ") ? fmt::format(" ({})", base::printable(advice)) : ""));
    }
    const bool has_backslash = written.find('\\') != written.npos;
    if (has_backslash && base::is_within(images, written) && has(images / written)) {
      photo.file = written;
    } else if (!has(images / photo.file)) {
      if (missing++ == 0) first = &photo;
      unreadable[images / photo.file] = kMissingFile;
    }
  }
  if (missing == 0) return;
  const bool are_most = 2 * missing > instances.photos.size();
  const std::string text =
      fmt::format("coco: '{}': there is no file for {} of {}, such as '{}'; {}", annotations,
                  missing, base::counted(std::ssize(instances.photos), "photo"),
                  base::printable((images / first->file_name()).string()),
                  base::printable(advice_on(images, first->file, are_most)));
  if (missing == instances.photos.size()) throw base::UserError(text);
  instances.remarks.push_back({.text = text, .is_fault = true, .unreadable = unreadable});
}

/// Detections are compared with the boxes of the whole image.
void check_test_transforms(const CocoOptions& options) {
  const auto* const other = detail::first_but_resize(options.test_transforms);
  if (other == nullptr) return;
  throw base::UserError(
      fmt::format("coco: test_transforms has {}, and detections are compared with the boxes of the "
                  "whole image; leave only resize",
                  other->type()));
}

/// Whether all boxes lie within the first pixel of larger images: they are shares of the sides.
bool are_shares(const CocoInstances& instances) {
  constexpr double kPixel = 1.001;  // converters round shares slightly above 1
  return std::ranges::all_of(instances.photos, [&](const CocoInstances::Photo& photo) {
    return std::max(photo.size.width, photo.size.height) > 1 &&
           std::ranges::all_of(instances.of(photo), [](const Annotation& box) {
             return std::max({box.x, box.y, box.width, box.height}) <= kPixel;
           });
  });
}

/// Counts images without annotations, boxes without area and those below a pixel.
/// @throws base::UserError if boxes are not in pixels, or there is none to learn from.
void check_content(CocoInstances& instances, const std::string& annotations, Split split) {
  const auto& boxes = instances.annotations;
  const auto empty = std::ranges::count(instances.photos, size_t{0}, &CocoInstances::Photo::count);
  const auto flat = std::ranges::count_if(
      boxes, [](const Annotation& box) { return box.width == 0 || box.height == 0; });
  if (empty > 0) {
    spdlog::info("coco: images without annotations in '{}': {} of {}; they are background",
                 annotations, empty, instances.photos.size());
  }
  if (flat > 0) {
    spdlog::info("coco: boxes without area in '{}': {} of {}; they are left out", annotations, flat,
                 boxes.size());
  }
  const auto shown = [](const Annotation& box) {
    return fmt::format(
        "such as [{}, {}, {}, {}] of annotation {}; boxes are in pixels, [x, y, width, height]",
        box.x, box.y, box.width, box.height, box.id);
  };
  if (std::ranges::any_of(boxes, is_target) && are_shares(instances)) {
    throw base::UserError(fmt::format(
        "coco: '{}': all boxes ({}) lie within the first pixel of their images, {}: multiply x and "
        "width by the image's width, y and height by its height",
        annotations, boxes.size(), shown(boxes.front())));
  }
  const auto is_tiny = [](const Annotation& box) {
    return is_target(box) && box.width < 1 && box.height < 1;
  };
  // A few may be right; more are often shares of the image.
  if (const auto tiny = std::ranges::count_if(boxes, is_tiny); 100 * tiny > std::ssize(boxes)) {
    instances.remarks.push_back({fmt::format(
        "coco: '{}': {} of {} boxes are less than a pixel wide and high, {}. The network does not "
        "learn them, unless a transform makes them larger",
        annotations, tiny, boxes.size(), shown(*std::ranges::find_if(boxes, is_tiny)))});
  }
  if (split == Split::kTrain && std::ranges::none_of(boxes, is_target)) {
    std::string text = fmt::format(
        "coco: '{}' has no box to learn from ({} of {} annotations are crowds: iscrowd); annotate "
        "its images, or name the right file in data.train_annotations",
        annotations, std::ranges::count_if(boxes, &Annotation::is_crowd), boxes.size());
    for (const Remark& remark : instances.remarks) text += '\n' + remark.text;
    throw base::UserError(text);
  }
}

}  // namespace

void CocoOptions::describe(config::Schema<CocoOptions>& schema) {
  using Options = CocoOptions;
  schema
      .field("train_annotations", &Options::train_annotations,
             "JSON file of the instances, such as instances_train2017.json")
      .required();
  schema.field("train_images", &Options::train_images, "the folder of its images").required();
  schema.field("val_annotations", &Options::val_annotations,
               "the same for the validation split, which may lack categories; empty: none");
  schema.field("val_images", &Options::val_images,
               "the same for the validation split; empty: none");
  schema.field("test_annotations", &Options::test_annotations,
               "the same for the test split, which may lack categories; empty: none");
  schema.field("test_images", &Options::test_images, "the same for the test split; empty: none");
  schema.refuse("val_annotations and val_images go together", [](const Options& options) {
    return options.val_annotations.empty() != options.val_images.empty();
  });
  schema.refuse("test_annotations and test_images go together", [](const Options& options) {
    return options.test_annotations.empty() != options.test_images.empty();
  });
  detail::describe_image_files(schema);
}

std::shared_ptr<const Dataset> load_coco(const CocoOptions& options, Split split) {
  const std::string& annotations = detail::of_split(
      split, options.train_annotations, options.val_annotations, options.test_annotations);
  if (annotations.empty()) return nullptr;
  check_test_transforms(options);
  const std::string& images =
      detail::of_split(split, options.train_images, options.val_images, options.test_images);
  CocoInstances instances = detail::read_coco_instances(annotations, options.train_annotations);
  if (instances.photos.empty() || instances.classes.empty()) {
    // The categories are those of the training file, if there is one.
    const bool is_training = !instances.photos.empty() && base::exists(options.train_annotations);
    throw base::UserError(fmt::format("coco: '{}' has no {}",
                                      is_training ? options.train_annotations : annotations,
                                      instances.photos.empty() ? "images" : "categories"));
  }
  check_content(instances, annotations, split);
  find_files(instances, images, annotations);
  return std::make_shared<const Coco>(options, split, images, std::move(instances));
}

}  // namespace syncbn::data
