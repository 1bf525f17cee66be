#include "sets/coco_instances.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <limits>
#include <memory>
#include <optional>
#include <set>
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

constexpr int64_t kMaxFaults = 10;

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
/// annotation's box: the polygons, which take most of a file and of the time to parse it. Shows NaN
/// and Infinity, which Python's json.dump() writes and the parser refuses, as null.
class WithoutPolygons {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = char;

  WithoutPolygons(const char* begin, const char* end) : at_(begin), end_(end) {}

  char operator*() const { return null_.empty() ? *at_ : null_.front(); }
  bool operator==(const WithoutPolygons& other) const { return at_ == other.at_; }
  WithoutPolygons& operator++() {
    if (!null_.empty()) {
      null_.remove_prefix(1);
      return *this;
    }
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
    if (!is_string_ && at_ != end_ && (*at_ == '-' || *at_ > ':')) skip_no_number();
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

  void skip_no_number() {
    const std::string_view text(at_, static_cast<size_t>(end_ - at_));
    const size_t sign = text.front() == '-' ? 1 : 0;
    for (const std::string_view word : {"NaN", "nan", "Infinity", "inf"}) {
      if (!text.substr(sign).starts_with(word)) continue;
      at_ += sign + word.size();
      null_ = "null";
      return;
    }
  }

  const char* at_;
  const char* end_;
  std::string_view null_;  ///< what is left of a null to show before *at_
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
  int64_t left_out = 0;             ///< annotations
  std::vector<std::string> faults;  ///< of the first of these
  std::vector<int64_t> ids;         ///< of the other annotations that have one

  void leave_out(std::string fault) {
    if (left_out++ < kMaxFaults) faults.push_back(std::move(fault));
  }
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
    for (const char* const name : {"images", "annotations", "categories"}) {
      if (lists_.contains(name)) continue;
      throw base::UserError(
          fmt::format("coco: '{}' has no list '{}'; is it a file of instances, such as "
                      "instances_val2017.json?",
                      file_, name));
    }
  }

  bool null() override {
    if (is_box_) number(kNoNumber, std::nullopt);
    return true;
  }
  bool boolean(bool value) override { return number_integer(value ? 1 : 0); }
  bool number_integer(int64_t value) override {
    number(static_cast<double>(value), value);
    return true;
  }
  bool number_unsigned(uint64_t value) override {
    return number_integer(static_cast<int64_t>(value));
  }
  bool number_float(double value, const std::string&) override {
    number(value, detail::whole_number(value));
    return true;
  }
  bool string(std::string& value) override {
    number_text(value);
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
    if (depth_ == 1) list_ = name;
    if (depth_ == kElementDepth) field_ = name;
    return true;
  }
  bool start_array(size_t) override {
    if (depth_++ == 1) {
      lists_.insert(list_);
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

  /// The values found so far in the current element.
  struct Element {
    std::optional<int64_t> id, image_id, category_id, width, height, is_crowd;
    std::optional<double> area;
    std::vector<double> box;
    std::optional<std::string> name, file_name;
  };

  static constexpr double kNoNumber = std::numeric_limits<double>::quiet_NaN();

  void number_text(std::string_view text) {
    const auto whole = detail::whole_number(text);
    const double value = whole ? static_cast<double>(*whole) : kNoNumber;
    number(base::parse_number<double>(text).value_or(value), whole);
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
    if (field_ == "area" && std::isfinite(value)) element_.area = value;
    if (field_ == "name") element_.name = fmt::format("{}", value);
    if (field_ == "file_name") element_.file_name = fmt::format("{}", value);
  }

  void add_element() {
    if (list_ == "images") {
      add_image();
    } else if (list_ == "annotations") {
      add_annotation();
    } else if (list_ == "categories") {
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

  /// Leaves out an annotation that lacks a value: another may do without it.
  void add_annotation() {
    constexpr size_t kNumbers = 4;
    const auto& box = element_.box;
    const char* const missing = box.size() != kNumbers  ? "'bbox' of 4 numbers"
                                : !element_.image_id    ? "whole number 'image_id'"
                                : !element_.category_id ? "whole number 'category_id'"
                                                        : nullptr;
    if (missing != nullptr) return out_.leave_out(fmt::format("{} has no {}", name(), missing));
    if (element_.id) out_.ids.push_back(*element_.id);
    out_.annotations.push_back({.image_id = *element_.image_id,
                                .annotation = {.label = *element_.category_id,
                                               .x = box[0],
                                               .y = box[1],
                                               .width = box[2],
                                               .height = box[3],
                                               .area = element_.area.value_or(box[2] * box[3]),
                                               .is_crowd = element_.is_crowd.value_or(0) != 0,
                                               .id = element_.id.value_or(position_)}});
  }

  /// "annotation 5"
  std::string name() const {
    const char* const what = list_ == "images"        ? "image"
                             : list_ == "annotations" ? "annotation"
                                                      : "category";
    return element_.id ? fmt::format("{} {}", what, *element_.id)
                       : fmt::format("{} number {} (from 0)", what, position_);
  }

  template <class T>
  const T& required(const std::optional<T>& value, const char* key) const {
    if (value) return *value;
    throw base::UserError(fmt::format("coco: '{}': {} has no {} '{}'", file_, name(),
                                      std::is_same_v<T, int64_t> ? "whole number" : "text", key));
  }

  std::string file_;
  std::string_view text_;
  Lists& out_;
  int depth_ = 0;
  std::set<std::string> lists_;  ///< of the root
  std::string list_;             ///< the last key of the root
  int64_t position_ = 0;         ///< in the list
  std::string field_;            ///< the element's last key
  bool is_box_ = false;
  Element element_;
};

/// Sorts by id. @throws base::UserError if two elements have the same one.
template <class Item>
void sort_by_id(std::vector<Item>& items, const char* what, const std::string& file) {
  std::ranges::sort(items, {}, &Item::id);
  const auto twice = std::ranges::adjacent_find(items, {}, &Item::id);
  if (twice == items.end()) return;
  throw base::UserError(fmt::format("coco: '{}' has two {} with the id {}", file, what, twice->id));
}

/// The position of the element with this id.
template <class Item>
std::optional<size_t> find_sorted(const std::vector<Item>& sorted, int64_t id) {
  const auto found = std::ranges::lower_bound(sorted, id, {}, &Item::id);
  if (found == sorted.end() || found->id != id) return std::nullopt;
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
  const bool is_finite = std::isfinite(box.x + box.y + box.width + box.height);
  return fmt::format(
      "the box of annotation {} ([{}, {}, {}, {}]) {} image {} ({} x {} pixels); a box is [x, y, "
      "width, height]",
      box.id, box.x, box.y, box.width, box.height,
      is_finite ? "is not within" : "has NaN or Infinity, in", photo.id, width, height);
}

/// Class names must be unique: they name results. Of several categories with a name, Roboflow's
/// root among them, the last keeps it.
void rename_twins(std::vector<Category>& categories, const std::string& file,
                  std::vector<Remark>& remarks) {
  std::set<std::string> taken;
  for (auto category = categories.rbegin(); category != categories.rend(); ++category) {
    auto& [id, name] = *category;
    const std::string given = name;
    while (!taken.insert(name).second) name += fmt::format(" ({})", id);
    if (name == given) continue;
    remarks.push_back(
        {fmt::format("coco: '{}': category {} has the name of another; it is called '{}' here",
                     file, id, base::printable(name))});
  }
}

/// Replaces ids of images and categories by positions, and sorts annotations by image.
CocoInstances resolve(Lists lists, const std::string& file) {
  using Photo = CocoInstances::Photo;
  CocoInstances made;
  sort_by_id(lists.photos, "images", file);
  sort_by_id(lists.categories, "categories", file);
  rename_twins(lists.categories, file, made.remarks);
  std::ranges::sort(lists.ids);
  lists.ids.erase(std::ranges::unique(lists.ids).begin(), lists.ids.end());
  if (lists.ids.size() < lists.annotations.size()) {
    made.remarks.push_back({fmt::format(
        "coco: '{}': {} of {} annotations have no id, or that of another; boxes do not need it",
        file, lists.annotations.size() - lists.ids.size(), lists.annotations.size())});
  }

  size_t kept = 0;
  for (Placed& placed : lists.annotations) {
    Annotation& annotation = placed.annotation;
    const auto photo = find_sorted(lists.photos, placed.image_id);
    const auto category = find_sorted(lists.categories, annotation.label);
    std::string fault =
        photo && category ? fault_of(annotation, lists.photos[*photo])
                          : fmt::format("annotation {} has the {} {}, which the file does not list",
                                        annotation.id, photo ? "category_id" : "image_id",
                                        photo ? annotation.label : placed.image_id);
    if (!fault.empty()) {
      lists.leave_out(std::move(fault));
      continue;
    }
    annotation.label = static_cast<int64_t>(*category);
    ++lists.photos[*photo].count;
    lists.annotations[kept++] = placed;
  }
  lists.annotations.resize(kept);
  std::ranges::stable_sort(lists.annotations, {}, &Placed::image_id);

  made.photos = std::move(lists.photos);
  size_t first = 0;
  for (Photo& photo : made.photos) photo.first = std::exchange(first, first + photo.count);
  made.annotations.reserve(lists.annotations.size());
  for (const Placed& placed : lists.annotations) made.annotations.push_back(placed.annotation);
  for (Category& category : lists.categories) {
    made.class_ids.push_back(category.id);
    made.classes.push_back(std::move(category.name));
  }
  if (lists.left_out > 0) {
    if (lists.left_out > kMaxFaults) lists.faults.emplace_back("…");
    made.remarks.push_back(
        {.text = fmt::format("coco: '{}': {} of {} annotations cannot be used: {}", file,
                             lists.left_out, lists.left_out + static_cast<int64_t>(kept),
                             base::join(lists.faults, "\n  ")),
         .is_fault = true});
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
