#include "sets/coco_instances.h"

#include <fmt/ranges.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <string_view>
#include <tuple>
#include <unordered_set>
#include <utility>

#include <nlohmann/json.hpp>

#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/base/open_file.h>
#include <syncbn/base/text.h>

#include "index/index_file.h"
#include "sets/file_bytes.h"
#include "sets/image_set.h"

namespace syncbn::data::detail {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMaxFaults = 10;

/// A file's content, mapped: an annotation file may have hundreds of MB.
MappedBytes map_file(const fs::path& path) {
  const base::UniqueFd file = base::open_regular_file(path);
  const auto size = static_cast<size_t>(size_of_file(file, path));
  if (size == 0) return {};
  void* const bytes = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (bytes == MAP_FAILED) base::throw_errno("cannot map " + path.string());
  return {static_cast<char*>(bytes), {size}};
}

/// An input iterator over a JSON text that leaves out the numbers of lists nested deeper than an
/// annotation's box: the polygons, which take most of a file and of the time to parse it. Python's
/// json.dump() writes NaN and Infinity, which the parser refuses: shows them as kNan, and as the
/// largest number.
class WithoutPolygons {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = char;

  explicit WithoutPolygons(std::string_view text)
      : at_(text.data()), end_(text.data() + text.size()) {}

  char operator*() const { return shown_.empty() ? *at_ : shown_.front(); }
  bool operator==(const WithoutPolygons& other) const { return at_ == other.at_; }
  WithoutPolygons& operator++() {
    if (!shown_.empty()) {
      shown_.remove_prefix(1);
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

  static constexpr std::string_view kNan = "0e-99999";  ///< in place of NaN; no tool writes it

 private:
  static constexpr int kBoxDepth = 4;  ///< root, list, annotation, box
  static constexpr std::string_view kLowest = "-1.7976931348623157e308";

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
      shown_ = word.ends_with('n') || word.ends_with('N') ? kNan : kLowest.substr(1 - sign);
      return;
    }
  }

  const char* at_;
  const char* end_;
  std::string_view shown_;  ///< what is left to show before *at_
  int depth_ = 0;
  bool is_string_ = false;
  bool is_escaped_ = false;
};

struct Category {
  int64_t id = 0;
  std::string name;

  bool operator==(const Category&) const = default;
};

/// Here, the annotation's label is its category's id.
struct Placed {
  int64_t image_id = 0;
  Annotation annotation;
};

/// The lists of a file, in its order.
struct Lists {
  FileStamp stamp;  ///< before the file was read
  std::vector<CocoInstances::Photo> photos;
  std::vector<Placed> annotations;
  std::vector<Category> categories;
  int64_t left_out = 0;                    ///< annotations
  std::vector<std::string> faults;         ///< of the first of these
  std::vector<int64_t> ids;                ///< of the other annotations that have one
  std::vector<int64_t> with_faulty_boxes;  ///< ids of images

  void leave_out(std::string fault) {
    if (left_out++ < kMaxFaults) faults.push_back(std::move(fault));
  }
};

/// Receives the parser's events and builds the lists. Ignores other keys, and if asked to, the
/// content of all lists but the categories.
class InstancesReader final : public nlohmann::json_sax<nlohmann::json> {
 public:
  InstancesReader(std::string file, std::string_view text, bool only_categories, Lists& out)
      : file_(std::move(file)), text_(text), only_categories_(only_categories), out_(out) {}

  WithoutPolygons begin() const { return WithoutPolygons(text_); }
  WithoutPolygons end() const { return WithoutPolygons(text_.substr(text_.size())); }

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

  bool null() override { return number(kNoNumber, std::nullopt, "null"); }
  bool boolean(bool value) override { return number_integer(value ? 1 : 0); }
  bool number_integer(int64_t value) override { return number(static_cast<double>(value), value); }
  bool number_unsigned(uint64_t value) override {
    return number_integer(static_cast<int64_t>(value));
  }
  bool number_float(double value, const std::string& text) override {
    if (text == WithoutPolygons::kNan) return number(kNoNumber, std::nullopt, "NaN");
    // WithoutPolygons shows Infinity as the largest number.
    if (std::abs(value) == std::numeric_limits<double>::max())
      return number(std::copysign(HUGE_VAL, value), std::nullopt, "Infinity");
    return number(value, detail::whole_number(value), text);
  }
  bool string(std::string& value) override {
    const auto whole = detail::whole_number(value);
    number(number_of(value, whole), whole, value, "\"");
    if (depth_ != kElementDepth) return true;
    if (field_ == "bbox") read_box(value);
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
    for (; position > 0 && at != end(); --position) ++at;
    const bool is_empty = text_.find_first_not_of(" \t\r\n") == text_.npos;
    const std::string why =
        is_empty       ? "it is empty"
        : position > 0 ? "it ends too early; it was cut short"
                       : fmt::format("it is damaged at byte {}", at.position() - text_.data());
    throw base::UserError(
        fmt::format("coco: '{}' is not JSON: {}", file_, base::foreign_file(text_, why)));
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
    std::map<std::string, std::string> not_whole;  ///< values of other kinds, as written
  };

  static constexpr double kNoNumber = std::numeric_limits<double>::quiet_NaN();

  static double number_of(std::string_view text, std::optional<int64_t> whole) {
    const double value = whole ? static_cast<double>(*whole) : kNoNumber;
    return base::parse_number<double>(text).value_or(value);
  }

  /// A box in one text, as tables hold it: "10 20 30 40", "[10, 20, 30, 40]".
  void read_box(std::string text) {
    std::ranges::replace_if(
        text, [](char c) { return std::strchr("[](),;", c) != nullptr; }, ' ');
    std::istringstream words(text);
    for (std::string word; words >> word;) {
      element_.box.push_back(number_of(word, detail::whole_number(word)));
    }
  }

  /// @param written what is in the file, and its quotes; needed only if it is not a whole number
  bool number(double value, std::optional<int64_t> whole, std::string_view written = "",
              std::string_view quote = "") {
    if (is_box_ && depth_ == kElementDepth + 1) element_.box.push_back(value);
    if (depth_ == kListDepth && list_ == "categories") {
      throw base::UserError(
          fmt::format("coco: '{}': each category must be an object with id and name", file_));
    }
    if (depth_ != kElementDepth) return true;
    constexpr std::pair<std::string_view, std::optional<int64_t> Element::*> kWhole[] = {
        {"id", &Element::id},         {"image_id", &Element::image_id},
        {"width", &Element::width},   {"category_id", &Element::category_id},
        {"height", &Element::height}, {"iscrowd", &Element::is_crowd}};
    for (const auto& [key, member] : kWhole) {
      if (field_ != key) continue;
      element_.*member = whole;
      if (!whole) element_.not_whole[field_] = fmt::format("{1}{0}{1}", written, quote);
    }
    if (field_ == "area" && std::isfinite(value)) element_.area = value;
    if (field_ == "name" && !std::isnan(value)) element_.name = fmt::format("{}", value);
    if (field_ == "file_name" && !std::isnan(value)) element_.file_name = fmt::format("{}", value);
    return true;
  }

  void add_element() {
    if (only_categories_ && list_ != "categories") return;
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
    constexpr const char* kAdvice = "; give the photo's width and height in pixels";
    const ImageSize size = {required(element_.width, "width", kAdvice),
                            required(element_.height, "height", kAdvice)};
    if (size.width < 1 || size.height < 1) {
      throw base::UserError(fmt::format("coco: '{}': image {} has {} x {} pixels{}", file_, id,
                                        size.width, size.height, kAdvice));
    }
    std::string written = required(element_.file_name, "file_name");
    std::string slashed = written;
    std::ranges::replace(slashed, '\\', '/');
    std::string file = fs::path(slashed).lexically_normal().string();
    if (written == file) written.clear();
    out_.photos.push_back(
        {.id = id, .size = size, .file = std::move(file), .written = std::move(written)});
  }

  /// Leaves out an annotation that lacks a value: another may do without it.
  void add_annotation() {
    constexpr size_t kNumbers = 4;
    const auto& box = element_.box;
    if (box.size() != kNumbers) {
      if (element_.image_id) out_.with_faulty_boxes.push_back(*element_.image_id);
      return out_.leave_out(name() +
                            " has no 'bbox' of 4 numbers, [x, y, width, height] (the "
                            "polygons of a 'segmentation' are not read)");
    }
    if (!element_.image_id) return out_.leave_out(fault_of("image_id"));
    if (!element_.category_id) return out_.leave_out(fault_of("category_id"));
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
    const auto what = list_ == "categories" ? "category" : list_.substr(0, list_.size() - 1);
    return element_.id ? fmt::format("{} {}", what, *element_.id)
                       : fmt::format("{} number {} (from 0)", what, position_);
  }

  template <class T>
  const T& required(const std::optional<T>& value, const char* key, const char* advice = "") const {
    if (value) return *value;
    const char* const kind = std::is_same_v<T, int64_t> ? "whole number" : "text";
    throw base::UserError(fmt::format("coco: '{}': {}{}", file_, fault_of(key, kind), advice));
  }

  /// "annotation 5 has no whole number 'image_id'"
  std::string fault_of(const char* key, const char* kind = "whole number") const {
    constexpr int kShown = 60;
    const auto found = element_.not_whole.find(key);
    if (found == element_.not_whole.end())
      return fmt::format("{} has no {} '{}'", name(), kind, key);
    return fmt::format("{} has the {} {}, which is not a whole number", name(), key,
                       base::shortened(base::printable(found->second), kShown));
  }

  std::string file_;
  std::string_view text_;
  bool only_categories_;
  Lists& out_;
  int depth_ = 0;
  std::set<std::string> lists_;  ///< of the root
  std::string list_;             ///< the last key of the root
  int64_t position_ = 0;         ///< in the list
  std::string field_;            ///< the element's last key
  bool is_box_ = false;
  Element element_;
};

Lists read_lists(const fs::path& path, bool only_categories = false) {
  Lists lists;
  lists.stamp = stamp_of(path);
  const MappedBytes bytes = map_file(path);
  InstancesReader reader(path.string(), {bytes.get(), bytes.get_deleter().size}, only_categories,
                         lists);
  nlohmann::json::sax_parse(reader.begin(), reader.end(), &reader);
  reader.check_complete();
  return lists;
}

/// Sorts by id. Merged files may have equal elements.
/// @throws base::UserError if two different elements have the same id.
template <class Item>
void sort_by_id(std::vector<Item>& items, const char* what, std::string Item::*name,
                const std::string& file) {
  std::ranges::sort(items, {}, &Item::id);
  const auto twice = std::ranges::adjacent_find(
      items, [](const Item& one, const Item& next) { return one.id == next.id && one != next; });
  if (twice == items.end()) return;
  throw base::UserError(fmt::format(
      "coco: '{}' has two {} with the id {}, '{}'; correct or remove one of them (another id is "
      "needed in its annotations as well)",
      file, what, twice->id,
      base::printable((*twice).*name + "' and '" + (*std::next(twice)).*name)));
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

/// Whether a box would be within its image if it were written as [x1, y1, x2, y2].
bool fits_as_corners(Annotation box, const CocoInstances::Photo& photo) {
  box.width -= box.x;
  box.height -= box.y;
  return box.width > 0 && box.height > 0 && fault_of(box, photo).empty();
}

/// Sorts by id and drops repetitions. Returns the classes: of each name, the category of the
/// highest id. Merged files have names more than once, and Roboflow's root, category 0, may have
/// that of a class.
std::vector<Category> sort_categories(std::vector<Category>& categories, const std::string& file,
                                      std::vector<Remark>& remarks) {
  constexpr size_t kShown = 8;
  sort_by_id(categories, "categories", &Category::name, file);
  categories.erase(std::ranges::unique(categories).begin(), categories.end());
  std::map<std::string, std::vector<int64_t>> ids;
  for (const auto& [id, name] : categories) ids[name].push_back(id);
  std::vector<Category> classes;
  std::ranges::copy_if(categories, std::back_inserter(classes), [&](const Category& category) {
    return category.id == ids[category.name].back();
  });
  std::vector<std::string> joined;
  for (const auto& [name, own] : ids) {
    if (own.size() > 1) joined.push_back(fmt::format("'{}' ({})", name, fmt::join(own, ", ")));
  }
  add_remark(remarks, fmt::format("coco: '{}': categories with the same name", file),
             base::printable(base::join_some(joined, ", ", kShown)),
             "they are one class, with the highest id");
  return classes;
}

/// Of photos with the same file name and size, keeps the first. Returns its id by each of theirs.
std::map<int64_t, int64_t> drop_repeated(std::vector<CocoInstances::Photo>& photos) {
  std::map<std::tuple<std::string, int64_t, int64_t>, int64_t> first;
  std::map<int64_t, int64_t> repeated;
  std::erase_if(photos, [&](const CocoInstances::Photo& photo) {
    const auto [width, height] = photo.size;
    const auto [found, is_new] = first.try_emplace({photo.file, width, height}, photo.id);
    if (!is_new) repeated[photo.id] = repeated[found->second] = found->second;
    return !is_new;
  });
  return repeated;
}

/// The categories that give `path` its labels, by position: those of the training file, or its own
/// if there is no such file. Keeps them for the next split, since the file may have hundreds of MB.
/// @param own those of `path`
const std::vector<Category>& classes_of(const fs::path& path, const fs::path& training,
                                        const FileStamp& own_stamp, std::vector<Category> own) {
  // Ranks of one process may load data at the same time.
  thread_local std::tuple<fs::path, FileStamp, std::vector<Category>> known;
  const auto& [file, stamp, classes] = known;
  if (path == training || !base::exists(training)) {
    known = {path, own_stamp, std::move(own)};
  } else if (file != training || stamp != stamp_of(training)) {
    Lists lists = read_lists(training, /*only_categories=*/true);
    std::vector<Remark> ignored;
    known = {training, lists.stamp, sort_categories(lists.categories, training.string(), ignored)};
  }
  return classes;
}

}  // namespace

CocoInstances read_coco_instances(const fs::path& path, const fs::path& training) {
  Lists lists = read_lists(path);
  // Ids of images and categories become positions.
  const std::string file = path.string();
  CocoInstances made;
  const auto listed = std::ssize(lists.photos);
  sort_by_id(lists.photos, "images", &CocoInstances::Photo::file, file);
  const std::map<int64_t, int64_t> first_ids = drop_repeated(lists.photos);
  const std::vector<Category>& classes = classes_of(
      path, training, lists.stamp, sort_categories(lists.categories, file, made.remarks));
  if (lists.categories.empty()) lists.categories = classes;
  // By category of this file; classes.size() if the training file lacks it.
  std::vector<std::ptrdiff_t> labels;
  for (const Category& one : lists.categories) {
    labels.push_back(std::ranges::find(classes, one.name, &Category::name) - classes.begin());
  }
  std::ranges::sort(lists.ids);
  lists.ids.erase(std::ranges::unique(lists.ids).begin(), lists.ids.end());
  if (first_ids.empty() && lists.ids.size() < lists.annotations.size()) {
    made.remarks.push_back({fmt::format(
        "coco: '{}': {} of {} annotations have no id, or that of another; boxes do not need it",
        file, lists.annotations.size() - lists.ids.size(), lists.annotations.size())});
  }

  const auto first_id = [&](int64_t id) {
    const auto found = first_ids.find(id);
    return found == first_ids.end() ? id : found->second;
  };
  const auto boxes = std::ssize(lists.annotations);
  const int64_t total = lists.left_out + boxes;
  size_t kept = 0;
  int64_t corners = 0;  // boxes that could be [x1, y1, x2, y2]
  bool has_faulty_box = false;
  std::set<std::string> own;  // classes of boxes
  std::vector<uint8_t> has_boxes(lists.categories.size());
  std::set<std::tuple<int64_t, int64_t, double, double, double, double, bool>> seen;
  for (Placed& placed : lists.annotations) {
    Annotation& annotation = placed.annotation;
    const bool is_repeated = first_ids.contains(placed.image_id);
    placed.image_id = first_id(placed.image_id);
    const auto photo = find_sorted(lists.photos, placed.image_id);
    const auto category = find_sorted(lists.categories, annotation.label);
    std::string fault =
        photo && category ? fault_of(annotation, lists.photos[*photo])
                          : fmt::format("annotation {} has the {} {}, which the file does not list",
                                        annotation.id, photo ? "category_id" : "image_id",
                                        photo ? annotation.label : placed.image_id);
    if (photo && fits_as_corners(annotation, lists.photos[*photo])) ++corners;
    if (!fault.empty()) {
      if (photo && category) {
        has_faulty_box = true;
        lists.with_faulty_boxes.push_back(placed.image_id);
      }
      lists.leave_out(std::move(fault));
      continue;
    }
    if (std::exchange(has_boxes[*category], 1) == 0) own.insert(lists.categories[*category].name);
    annotation.label = labels[*category];
    const auto& [label, x, y, w, h, area, is_crowd, id] = annotation;
    // A file that was merged with itself has each box twice.
    if (is_repeated && !seen.emplace(placed.image_id, label, x, y, w, h, is_crowd).second) continue;
    ++lists.photos[*photo].count;
    lists.annotations[kept++] = placed;
  }
  lists.annotations.resize(kept);
  if (!first_ids.empty()) {
    made.remarks.push_back({fmt::format(
        "coco: '{}': {} of {} images repeat a file_name and size; each is taken once, and so "
        "are its equal boxes ({} left out)",
        file, listed - std::ssize(lists.photos), listed,
        total - lists.left_out - std::ssize(lists.annotations))});
  }
  std::ranges::stable_sort(lists.annotations, {}, &Placed::image_id);

  made.photos = std::move(lists.photos);
  // As background, images whose boxes are all faulty would teach that there is no object.
  std::unordered_set<int64_t> faulty;
  for (const int64_t id : lists.with_faulty_boxes) faulty.insert(first_id(id));
  const auto lost = std::erase_if(made.photos, [&](const CocoInstances::Photo& photo) {
    return photo.count == 0 && faulty.contains(photo.id);
  });
  size_t first = 0;
  for (auto& photo : made.photos) photo.first = std::exchange(first, first + photo.count);
  made.annotations.reserve(lists.annotations.size());
  for (const Placed& placed : lists.annotations) made.annotations.push_back(placed.annotation);
  for (const Category& category : classes) {
    made.class_ids.push_back(category.id);
    made.classes.push_back(category.name);
  }
  // Without boxes, a category that the training file lacks does no harm: Roboflow's root.
  check_classes(fmt::format("coco: '{}' has boxes of categories", file), own, training.string(),
                {made.classes.begin(), made.classes.end()});
  if (lists.left_out > 0) {
    if (lists.left_out > kMaxFaults) lists.faults.emplace_back("…");
    std::string text =
        fmt::format("coco: '{}': {} of {} annotations cannot be used", file, lists.left_out, total);
    if (lost > 0) {
      text += fmt::format(", and {} that {} no other", base::counted(lost, "image"),
                          lost == 1 ? "has" : "have");
      if (made.photos.empty()) text += "; no image is left";
    }
    // Most boxes of either form may fit the other, but of corners more than a few are faulty.
    if (has_faulty_box && 10 * corners >= 9 * boxes && 10 * lists.left_out >= boxes)
      text +=
          "; the boxes look like [x1, y1, x2, y2]; COCO's are [x, y, width, height]: subtract x1 "
          "and y1 from x2 and y2 in all boxes";
    text += ": " + base::join(lists.faults, "\n  ");
    if (lost > 0 && made.photos.empty()) throw base::UserError(text);
    made.remarks.push_back({.text = text, .is_fault = true});
  }
  return made;
}

}  // namespace syncbn::data::detail
