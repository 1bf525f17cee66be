#include "sets/shard_index.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>

#include <syncbn/base/error.h>
#include <syncbn/base/hash.h>
#include <syncbn/base/open_file.h>
#include <syncbn/base/text.h>

#include "image/reader.h"
#include "sets/file_bytes.h"
#include "sets/tar_index.h"

namespace syncbn::data::detail {
namespace {

namespace fs = std::filesystem;
using Place = ShardIndex::Place;

enum ShardSection : size_t {
  kShardPlaces = kKeySection + 1,
  kShardLabels,
  kShardEnds,
  kShardStamps,
  kShardLeftOut,
  kShardUnclosed
};

/// The end of webdataset's key of a sample: the name up to the first dot after the last slash.
size_t end_of_key(std::string_view name) {
  const size_t slash = name.rfind('/');
  return std::min(name.find('.', slash == std::string_view::npos ? 0 : slash), name.size());
}

/// Writes a ShardIndex, shard by shard.
class ShardIndexWriter {
 public:
  ShardIndexWriter(IndexWriter& out, int64_t classes) : out_(out), classes_(classes) {
    out_.begin(kShardPlaces);
  }

  void add(const fs::path& shard) {
    stamps_.push_back(settled_stamp_of(shard));
    shard_ = &shard;
    file_ = base::open_regular_file(shard);
    key_.clear();
    const bool is_closed =
        for_each_tar_member(file_, shard, [this](const TarMember& member) { take(member); });
    if (!is_closed) unclosed_.add(shard.string());
    finish_sample();
    ends_.push_back(std::ssize(labels_));
  }

  int64_t samples() const { return std::ssize(labels_); }

  std::string left_out() const { return left_out_.text(); }

  uint64_t finish() {
    out_.add_section(kShardLabels, std::vector<int64_t>(labels_.begin(), labels_.end()));
    out_.add_section(kShardEnds, ends_);
    out_.add_section(kShardStamps, stamps_);
    out_.begin(kShardLeftOut);
    out_.add_bytes(left_out());
    out_.begin(kShardUnclosed);
    out_.add_bytes(unclosed_.text());
    return hash_.value();
  }

 private:
  void take(const TarMember& member) {
    const size_t end = end_of_key(member.name);
    const std::string_view key = std::string_view(member.name).substr(0, end);
    const std::string_view extension = std::string_view(member.name).substr(end);
    // No part of a sample: a name without an extension, a hidden file such as macOS's ._1.jpg.
    if (extension.empty() || key.empty() || key.ends_with('/')) return;
    if (key != key_) {
      finish_sample();
      key_ = key;
    }
    const bool has_more_dots = extension.rfind('.') > 0;
    const NameKind kind = kind_of(extension);
    // webdataset ignores case, too.
    if (equals_in_lower_case(extension.substr(extension.rfind('.')), ".cls")) {
      if (has_more_dots) return left_out_.add(member.name);
      label_ = read_label(member);
    } else if (!has_more_dots && (kind == NameKind::kDecoded || (!image_ && is_image(member)))) {
      image_ = place_of(member);
    } else if (kind != NameKind::kNoImage) {
      others_.push_back(member.name);
    }
  }

  bool is_image(const TarMember& member) {
    read_at(file_, *shard_, member.offset, std::min(member.size, kMagicBytes), bytes_);
    return is_jpeg(bytes_) || is_png(bytes_);
  }

  Place place_of(const TarMember& member) const {
    if (member.size > UINT32_MAX) fail(member.name, "an image cannot have more than 4 GB");
    return {.offset = static_cast<uint64_t>(member.offset),
            .size = static_cast<uint32_t>(member.size),
            .shard = static_cast<uint32_t>(ends_.size())};
  }

  void finish_sample() {
    if (image_ ? !label_ : label_ && others_.empty()) fail_incomplete();
    if (!image_) {
      for (const std::string& name : others_) left_out_.add(name);
    } else {
      out_.add(std::span<const Place>(&*image_, 1));
      labels_.push_back(*label_);
      hash_.add(image_->offset);
      hash_.add(image_->size);
      hash_.add(static_cast<uint64_t>(*label_));
    }
    image_.reset();
    label_.reset();
    others_.clear();
  }

  int32_t read_label(const TarMember& member) {
    constexpr int64_t kMaxLabelBytes = 32;  // digits, perhaps with a newline
    if (member.size > kMaxLabelBytes) fail(member.name, "it is not a class label");
    read_at(file_, *shard_, member.offset, member.size, bytes_);
    std::string_view text(reinterpret_cast<const char*>(bytes_.data()), bytes_.size());
    const auto label = whole_number(text);
    if (!label || *label < 0 || *label >= classes_) {
      fail(member.name, fmt::format("a label is an integer from 0 to {}, not '{}'", classes_ - 1,
                                    base::printable(text)));
    }
    return *label;
  }

  [[noreturn]] void fail_incomplete() const {
    const std::string why = image_ ? "it has an image and no .cls" : "it has a .cls and no image";
    const bool is_closed = for_each_tar_member(file_, *shard_, [&](const TarMember& member) {
      const size_t end = end_of_key(member.name);
      const std::string extension = member.name.substr(end);
      const bool completes =
          image_ ? equals_in_lower_case(extension, ".cls")
                 : extension.rfind('.') == 0 && kind_of(extension) == NameKind::kDecoded;
      if (!completes ||
          fs::path(member.name.substr(0, end)).filename() != fs::path(key_).filename())
        return;
      fail(key_,
           fmt::format("{}; '{}' is elsewhere in the shard; {}", why, member.name, kSampleRule));
    });
    fail(key_, fmt::format("{}; {}{}", why, kSampleRule,
                           is_closed ? ""
                                     : "; or the shard is cut short: it ends without the "
                                       "closing blocks of a tar file"));
  }

  [[noreturn]] void fail(const std::string& member, const std::string& why) const {
    throw base::UserError(
        fmt::format("cannot read the shard '{}', sample '{}': {}", shard_->string(), member, why));
  }

  IndexWriter& out_;
  const int64_t classes_;
  base::Fnv1a hash_;
  std::vector<int32_t> labels_;
  std::vector<int64_t> ends_;
  std::vector<FileStamp> stamps_;
  // The current shard and its current sample.
  const fs::path* shard_ = nullptr;
  base::UniqueFd file_;
  std::string key_;
  std::optional<Place> image_;
  std::optional<int32_t> label_;
  /// Other images. Beside the sample's image they are its fields, such as .seg.png.
  std::vector<std::string> others_;
  FileCounts left_out_, unclosed_;
  std::vector<uint8_t> bytes_;
};

constexpr int64_t kMaxShards = 10'000'000;

/// The alternatives for which the text between two braces stands.
std::vector<std::string> alternatives(const std::string& inside, const std::string& pattern) {
  const size_t dots = inside.find("..");
  if (dots == std::string::npos)
    return inside.empty() ? std::vector<std::string>{""} : base::words_of(inside);
  const auto first = base::parse_number<int64_t>(inside.substr(0, dots));
  const auto last = base::parse_number<int64_t>(inside.substr(dots + 2));
  if (!first || !last || *first < 0 || *last < *first || *last - *first >= kMaxShards) {
    throw base::UserError(
        fmt::format("'{}': {{{}}} is not a range such as {{000..146}}", pattern, inside));
  }
  std::vector<std::string> all;
  for (int64_t i = *first; i <= *last; ++i) all.push_back(fmt::format("{:0{}}", i, dots));
  return all;
}

}  // namespace

bool ShardIndex::is_sound(const MappedIndex& index, int64_t classes) {
  const auto places = index.array<Place>(kShardPlaces);
  const auto labels = index.array<int64_t>(kShardLabels);
  const auto ends = index.array<int64_t>(kShardEnds);
  const auto stamps = index.array<FileStamp>(kShardStamps);
  const auto is_label = [&](int64_t label) { return label >= 0 && label < classes; };
  if (places.empty() || labels.size() != places.size() || ends.size() != stamps.size() ||
      !std::ranges::all_of(labels, is_label)) {
    return false;
  }
  size_t sample = 0;
  for (size_t shard = 0; shard < ends.size(); ++shard) {
    const auto end = static_cast<uint64_t>(ends[shard]);
    if (end < sample || end > places.size()) return false;
    uint64_t free = 0;  // the end of the previous image
    for (; sample < end; ++sample) {
      const Place& place = places[sample];
      if (place.shard != shard || place.offset < free || place.offset > stamps[shard].size ||
          place.size > stamps[shard].size - place.offset) {
        return false;
      }
      free = place.offset + place.size;
    }
  }
  return sample == places.size();
}

ShardIndex::ShardIndex(MappedIndex index)
    : index_(std::move(index)),
      places_(index_.array<Place>(kShardPlaces)),
      labels_(index_.array<int64_t>(kShardLabels)),
      shard_ends_(index_.array<int64_t>(kShardEnds)) {}

std::span<const FileStamp> ShardIndex::stamps() const {
  return index_.array<FileStamp>(kShardStamps);
}

std::string ShardIndex::left_out() const {
  return std::string(index_.text(kShardLeftOut));
}

std::string ShardIndex::unclosed() const {
  return std::string(index_.text(kShardUnclosed));
}

std::vector<ShardIndex::Range> ShardIndex::ranges(std::span<const int64_t> samples) const {
  std::vector<int64_t> sorted(samples.begin(), samples.end());
  std::ranges::sort(sorted);
  std::vector<Range> ranges;
  for (size_t i = 0; i < sorted.size(); ++i) {
    const Place& place = (*this)[sorted[i]];
    const auto offset = static_cast<int64_t>(place.offset);
    const bool follows =
        i > 0 && sorted[i] == sorted[i - 1] + 1 && ranges.back().shard == place.shard;
    if (!follows) ranges.push_back({place.shard, offset, 0});
    ranges.back().size = offset + place.size - ranges.back().offset;
  }
  return ranges;
}

std::vector<std::string> expand_braces(const std::string& pattern) {
  const size_t open = pattern.find('{');
  if (open == std::string::npos) return {pattern};
  const size_t close = pattern.find('}', open);
  if (close == std::string::npos) {
    throw base::UserError(fmt::format("'{}': a brace is not closed", pattern));
  }
  const auto tails = expand_braces(pattern.substr(close + 1));
  std::vector<std::string> all;
  for (const auto& middle : alternatives(pattern.substr(open + 1, close - open - 1), pattern)) {
    for (const std::string& tail : tails) {
      all.push_back(fmt::format("{}{}{}", pattern.substr(0, open), middle, tail));
    }
  }
  return all;
}

ShardIndex index_shards(const std::vector<fs::path>& shards, int64_t classes,
                        const std::string& pattern, const IndexCacheOptions& cache) {
  const auto build = [&](IndexWriter& out) {
    ShardIndexWriter writer(out, classes);
    for (const fs::path& shard : shards) writer.add(shard);
    if (writer.samples() == 0) {
      const std::string others = writer.left_out();
      throw base::UserError(fmt::format("tar_shards: there is no sample in '{}'{}; {}", pattern,
                                        others.empty() ? "" : ", but " + others, kSampleRule));
    }
    return writer.finish();
  };
  const auto is_current = [&](const MappedIndex& index) {
    const auto is_same = [](const FileStamp& stamp, const fs::path& shard) {
      return stamp == stamp_of(shard);
    };
    return std::ranges::equal(index.array<FileStamp>(kShardStamps), shards, is_same) &&
           ShardIndex::is_sound(index, classes);
  };
  std::string key = fmt::format("tar_shards of {} classes", classes);
  for (const fs::path& shard : shards) key += fmt::format("\n{}", fs::absolute(shard).string());
  return ShardIndex(
      open_index({.name = pattern, .key = key, .is_current = is_current, .build = build}, cache));
}

}  // namespace syncbn::data::detail
