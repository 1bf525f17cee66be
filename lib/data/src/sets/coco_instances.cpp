#include "sets/coco_instances.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include <nlohmann/json.hpp>

#include <syncbn/base/error.h>
#include <syncbn/base/open_file.h>
#include <syncbn/base/text.h>

#include "sets/file_bytes.h"

namespace syncbn::data::detail {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxFaults = 10;

/// A file's content, mapped: an annotation file may have hundreds of MB.
class MappedText {
 public:
  explicit MappedText(const fs::path& path) : bytes_(nullptr, Unmapper{0}) {
    const base::UniqueFd file = base::open_regular_file(path);
    const auto size = static_cast<size_t>(size_of_file(file, path));
    if (size == 0) return;
    void* const bytes = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.get(), 0);
    if (bytes == MAP_FAILED) base::throw_errno("cannot map " + path.string());
    bytes_ = {static_cast<char*>(bytes), Unmapper{size}};
  }

  std::string_view get() const { return {bytes_.get(), bytes_.get_deleter().size}; }

 private:
  struct Unmapper {
    size_t size;
    void operator()(char* bytes) const { ::munmap(bytes, size); }
  };
  std::unique_ptr<char, Unmapper> bytes_;
};

/// An input iterator over a JSON text that leaves out the numbers of lists nested deeper than an
/// annotation's box: the polygons, which take most of a file and of the time to parse it.
class WithoutPolygons {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = char;

  WithoutPolygons(const char* begin, const char* end) : at_(begin), end_(end) {}

  char operator*() const { return *at_; }
  bool operator==(const WithoutPolygons& other) const { return at_ == other.at_; }
  WithoutPolygons& operator++() {
    const char byte = *at_++;
    if (is_escaped_) {
      is_escaped_ = false;
    } else if (is_string_) {
      is_escaped_ = byte == '\\';
      is_string_ = byte != '"';
    } else if (byte == '"') {
      is_string_ = true;
    } else if (byte == ']' || byte == '}') {
      --depth_;
    } else if (byte == '[' || byte == '{') {
      if (++depth_ > kBoxDepth && byte == '[') skip_numbers();
    }
    return *this;
  }

  const char* position() const { return at_; }

 private:
  static constexpr int kBoxDepth = 4;  ///< root, list, annotation, box

  void skip_numbers() {
    const auto is_structure = [](char byte) {
      return byte == ']' || byte == '[' || byte == '"' || byte == '{' || byte == '}';
    };
    const char* const next = std::find_if(at_, end_, is_structure);
    if (next != end_ && *next == ']') at_ = next;
  }

  const char* at_;
  const char* end_;
  int depth_ = 0;
  bool is_string_ = false;
  bool is_escaped_ = false;
};

struct Category {
  int64_t id = 0;
  std::string name;
};

/// Here, the annotation's label is its category's id.
struct Placed {
  int64_t image_id = 0;
  Annotation annotation;
};

/// The lists of a file, in its order.
struct Lists {
  std::vector<CocoInstances::Photo> photos;
  std::vector<Placed> annotations;
  std::vector<Category> categories;
};

/// Receives the parser's events and builds the lists. Ignores other keys.
class InstancesReader final : public nlohmann::json_sax<nlohmann::json> {
 public:
  InstancesReader(std::string file, std::string_view text, Lists& out)
      : file_(std::move(file)), text_(text), out_(out) {}

  WithoutPolygons begin() const { return {text_.data(), text_.data() + text_.size()}; }
  WithoutPolygons end() const {
    const char* const end = text_.data() + text_.size();
    return {end, end};
  }

  /// @throws base::UserError if the file had no such list.
  void check_complete() const {
    for (const auto& [section, name] : {std::pair{kImages, "images"},
                                        {kAnnotations, "annotations"},
                                        {kCategories, "categories"}}) {
      if ((seen_ & section) == 0) {
        throw base::UserError(
            fmt::format("coco: '{}' has no list '{}'; is it a file of instances, such as "
                        "instances_val2017.json?",
                        file_, name));
      }
    }
  }

  bool null() override { return true; }
  bool boolean(bool value) override {
    if (depth_ == kElementDepth && field_ == "iscrowd") element_.is_crowd = value ? 1 : 0;
    return true;
  }
  bool number_integer(int64_t value) override {
    number(static_cast<double>(value), value);
    return true;
  }
  bool number_unsigned(uint64_t value) override {
    return number_integer(static_cast<int64_t>(value));
  }
  bool number_float(double value, const std::string&) override {
    number(value, std::nullopt);
    return true;
  }
  bool string(std::string& value) override {
    if (depth_ != kElementDepth) return true;
    if (field_ == "name") element_.name = value;
    if (field_ == "file_name") element_.file_name = value;
    return true;
  }
  bool binary(nlohmann::json::binary_t&) override { return true; }
  bool start_object(size_t) override {
    if (depth_++ == kListDepth) element_ = {};
    return true;
  }
  bool end_object() override {
    if (depth_-- == kElementDepth) add_element();
    return true;
  }
  bool key(std::string& name) override {
    if (depth_ == 1) section_ = section_of(name);
    if (depth_ == kElementDepth) field_ = name;
    return true;
  }
  bool start_array(size_t) override {
    if (depth_++ == 1) {
      seen_ |= section_;
      position_ = 0;
    }
    is_box_ = depth_ == kElementDepth + 1 && field_ == "bbox";
    return true;
  }
  bool end_array() override {
    --depth_;
    is_box_ = false;
    return true;
  }
  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception&) override {
    WithoutPolygons at = begin();
    while (position-- > 0 && at != end()) ++at;
    throw base::UserError(fmt::format("coco: '{}' is not JSON: it is damaged at byte {}", file_,
                                      at.position() - text_.data()));
  }

 private:
  // Number of open objects and lists: in a list of the root, and in an element of that list.
  static constexpr int kListDepth = 2;
  static constexpr int kElementDepth = 3;

  // Bits of `seen_`.
  static constexpr unsigned kOther = 0;
  static constexpr unsigned kImages = 1;
  static constexpr unsigned kAnnotations = 2;
  static constexpr unsigned kCategories = 4;

  /// The values found so far in the current element.
  struct Element {
    std::optional<int64_t> id, image_id, category_id, width, height, is_crowd;
    std::optional<double> area;
    std::vector<double> box;
    std::optional<std::string> name, file_name;
  };

  static unsigned section_of(const std::string& name) {
    if (name == "images") return kImages;
    if (name == "annotations") return kAnnotations;
    return name == "categories" ? kCategories : kOther;
  }

  void number(double value, std::optional<int64_t> whole) {
    if (is_box_ && depth_ == kElementDepth + 1) element_.box.push_back(value);
    if (depth_ != kElementDepth) return;
    if (field_ == "id") element_.id = whole;
    if (field_ == "image_id") element_.image_id = whole;
    if (field_ == "category_id") element_.category_id = whole;
    if (field_ == "width") element_.width = whole;
    if (field_ == "height") element_.height = whole;
    if (field_ == "iscrowd") element_.is_crowd = whole;
    if (field_ == "area") element_.area = value;
  }

  void add_element() {
    if (section_ == kImages) {
      add_image();
    } else if (section_ == kAnnotations) {
      add_annotation();
    } else if (section_ == kCategories) {
      out_.categories.push_back(
          {.id = required(element_.id, "id"), .name = required(element_.name, "name")});
    }
    ++position_;
  }

  void add_image() {
    const int64_t id = required(element_.id, "id");
    const ImageSize size = {required(element_.width, "width"), required(element_.height, "height")};
    if (size.width < 1 || size.height < 1) {
      throw base::UserError(fmt::format("coco: '{}': image {} has {} x {} pixels; give its size",
                                        file_, id, size.width, size.height));
    }
    out_.photos.push_back(
        {.id = id, .size = size, .file = required(element_.file_name, "file_name")});
  }

  void add_annotation() {
    constexpr size_t kNumbers = 4;
    const int64_t id = required(element_.id, "id");
    const auto& box = element_.box;
    if (box.size() != kNumbers) {
      throw base::UserError(
          fmt::format("coco: '{}': annotation {} has no 'bbox' of 4 numbers", file_, id));
    }
    out_.annotations.push_back(
        {.image_id = required(element_.image_id, "image_id"),
         .annotation = {.label = required(element_.category_id, "category_id"),
                        .x = box[0],
                        .y = box[1],
                        .width = box[2],
                        .height = box[3],
                        .area = element_.area.value_or(box[2] * box[3]),
                        .is_crowd = element_.is_crowd.value_or(0) != 0,
                        .id = id}});
  }

  template <class T>
  const T& required(const std::optional<T>& value, const char* key) const {
    if (value) return *value;
    const char* const what = section_ == kImages        ? "image"
                             : section_ == kAnnotations ? "annotation"
                                                        : "category";
    const std::string which = element_.id ? fmt::format("{} {}", what, *element_.id)
                                          : fmt::format("{} number {} (from 0)", what, position_);
    throw base::UserError(fmt::format("coco: '{}': {} has no {} '{}'", file_, which,
                                      std::is_same_v<T, int64_t> ? "whole number" : "text", key));
  }

  std::string file_;
  std::string_view text_;
  Lists& out_;
  int depth_ = 0;
  unsigned section_ = kOther;
  unsigned seen_ = 0;
  int64_t position_ = 0;  ///< in the list
  std::string field_;     ///< the element's last key
  bool is_box_ = false;
  Element element_;
};

template <class Items, class Id>
void check_unique(const Items& sorted, const Id& id, const char* what, const std::string& file) {
  const auto twice = std::ranges::adjacent_find(sorted, {}, id);
  if (twice == sorted.end()) return;
  throw base::UserError(
      fmt::format("coco: '{}' has two {} with the id {}", file, what, std::invoke(id, *twice)));
}

/// The position of the element with this id.
template <class Items, class Id>
std::optional<size_t> find_sorted(const Items& sorted, const Id& id, int64_t wanted) {
  const auto found = std::ranges::lower_bound(sorted, wanted, {}, id);
  if (found == sorted.end() || std::invoke(id, *found) != wanted) return std::nullopt;
  return static_cast<size_t>(found - sorted.begin());
}

/// Describes a box that is not within its image; empty for any other box.
std::string fault_of(const Annotation& box, const CocoInstances::Photo& photo) {
  constexpr double kTolerance = 1;  // pixels; COCO's own boxes are rounded
  const auto width = static_cast<double>(photo.size.width);
  const auto height = static_cast<double>(photo.size.height);
  if (box.width >= 0 && box.height >= 0 && box.x >= -kTolerance && box.y >= -kTolerance &&
      box.x + box.width <= width + kTolerance && box.y + box.height <= height + kTolerance) {
    return "";
  }
  return fmt::format(
      "the box of annotation {} ([{}, {}, {}, {}]) is not within image {} ({} x {} pixels); a box "
      "is [x, y, width, height]",
      box.id, box.x, box.y, box.width, box.height, photo.id, width, height);
}

/// Class names must be unique: they name results.
void check_names(std::vector<Category> categories, const std::string& file) {
  std::ranges::sort(categories, {}, &Category::name);
  const auto twice = std::ranges::adjacent_find(categories, {}, &Category::name);
  if (twice == categories.end()) return;
  throw base::UserError(fmt::format("coco: '{}': the categories {} and {} have the same name '{}'",
                                    file, twice->id, std::next(twice)->id,
                                    base::printable(twice->name)));
}

/// Replaces ids of images and categories by positions, and sorts annotations by image.
CocoInstances resolve(Lists lists, const std::string& file) {
  using Photo = CocoInstances::Photo;
  const auto id_of = [](const Placed& placed) { return placed.annotation.id; };
  std::ranges::sort(lists.photos, {}, &Photo::id);
  check_unique(lists.photos, &Photo::id, "images", file);
  std::ranges::sort(lists.categories, {}, &Category::id);
  check_unique(lists.categories, &Category::id, "categories", file);
  check_names(lists.categories, file);
  if (lists.categories.empty()) {
    throw base::UserError(fmt::format("coco: '{}' has an empty list 'categories'", file));
  }
  std::vector<int64_t> ids;
  ids.reserve(lists.annotations.size());
  for (const Placed& placed : lists.annotations) ids.push_back(id_of(placed));
  std::ranges::sort(ids);
  check_unique(ids, std::identity(), "annotations", file);

  std::vector<std::string> faults;
  for (auto& [image_id, annotation] : lists.annotations) {
    if (faults.size() == kMaxFaults) break;
    const auto photo = find_sorted(lists.photos, &Photo::id, image_id);
    const auto category = find_sorted(lists.categories, &Category::id, annotation.label);
    if (!photo || !category) {
      faults.push_back(fmt::format("annotation {} has the {} {}, which the file does not list",
                                   annotation.id, photo ? "category_id" : "image_id",
                                   photo ? annotation.label : image_id));
      continue;
    }
    const std::string fault = fault_of(annotation, lists.photos[*photo]);
    if (!fault.empty()) faults.push_back(fault);
    annotation.label = static_cast<int64_t>(*category);
    ++lists.photos[*photo].count;
  }
  if (!faults.empty()) {
    if (faults.size() == kMaxFaults) faults.emplace_back("and perhaps more");
    throw base::UserError(fmt::format("coco: '{}': {}", file, base::join(faults, "\n  ")));
  }
  std::ranges::stable_sort(lists.annotations, {}, &Placed::image_id);

  CocoInstances made;
  made.photos = std::move(lists.photos);
  size_t first = 0;
  for (Photo& photo : made.photos) photo.first = std::exchange(first, first + photo.count);
  made.annotations.reserve(lists.annotations.size());
  for (const Placed& placed : lists.annotations) made.annotations.push_back(placed.annotation);
  for (Category& category : lists.categories) {
    made.class_ids.push_back(category.id);
    made.classes.push_back(std::move(category.name));
  }
  return made;
}

}  // namespace

CocoInstances read_coco_instances(const fs::path& path) {
  const MappedText text(path);
  Lists lists;
  InstancesReader reader(path.string(), text.get(), lists);
  nlohmann::json::sax_parse(reader.begin(), reader.end(), &reader);
  reader.check_complete();
  return resolve(std::move(lists), path.string());
}

}  // namespace syncbn::data::detail
