#include <fmt/format.h>

#include <charconv>
#include <optional>
#include <string_view>

#include <syncbn/base/error.h>
#include <syncbn/base/hash.h>

#include "sets/file_bytes.h"
#include "sets/image_set.h"
#include "sets/shard_names.h"
#include "sets/tar_index.h"

namespace syncbn::data {
namespace {

namespace fs = std::filesystem;

struct Shard {
  fs::path path;
  base::UniqueFd file;
};

/// Where a sample's image is.
struct Place {
  int64_t offset;
  int64_t size;
  int32_t shard;
};

/// webdataset's: a name up to the first dot behind the last slash.
size_t end_of_key(std::string_view name) {
  const size_t slash = name.rfind('/');
  return std::min(name.find('.', slash == std::string_view::npos ? 0 : slash), name.size());
}

bool is_image(std::string_view extension) {
  return extension == ".jpg" || extension == ".jpeg" || extension == ".png";
}

/// Collects the samples of one shard.
class ShardIndexer {
 public:
  ShardIndexer(const Shard& shard, int32_t number, int64_t classes, std::vector<Place>& places,
               std::vector<int64_t>& labels)
      : shard_(shard), number_(number), classes_(classes), places_(places), labels_(labels) {}

  void run() {
    detail::for_each_tar_member(shard_.file, shard_.path,
                                [this](const detail::TarMember& member) { take(member); });
    finish();
  }

 private:
  void take(const detail::TarMember& member) {
    const size_t end = end_of_key(member.name);
    const std::string_view key = std::string_view(member.name).substr(0, end);
    const std::string_view extension = std::string_view(member.name).substr(end);
    if (key != key_) {
      finish();
      key_ = key;
    }
    if (is_image(extension)) image_ = Place{member.offset, member.size, number_};
    if (extension == ".cls") label_ = read_label(member);
  }

  void finish() {
    if (image_.has_value() != label_.has_value()) {
      fail(key_, image_ ? "it has an image and no .cls" : "it has a .cls and no image");
    }
    if (image_) {
      places_.push_back(*image_);
      labels_.push_back(*label_);
    }
    image_.reset();
    label_.reset();
  }

  int64_t read_label(const detail::TarMember& member) {
    constexpr int64_t kLongest = 32;  // digits, perhaps with a line end
    if (member.size > kLongest) fail(member.name, "it is no class label");
    detail::read_at(shard_.file, shard_.path, member.offset, member.size, bytes_);
    std::string_view text(reinterpret_cast<const char*>(bytes_.data()), bytes_.size());
    while (text.ends_with('\n') || text.ends_with('\r') || text.ends_with(' ')) {
      text.remove_suffix(1);
    }
    int64_t label = 0;
    const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), label);
    if (error != std::errc() || stop != text.data() + text.size() || label < 0 ||
        label >= classes_) {
      fail(member.name, fmt::format("a label is a number from 0 to {}", classes_ - 1));
    }
    return label;
  }

  [[noreturn]] void fail(const std::string& member, const std::string& why) const {
    throw base::UserError(fmt::format("cannot read the shard '{}', sample '{}': {}",
                                      shard_.path.string(), member, why));
  }

  const Shard& shard_;
  const int32_t number_;
  const int64_t classes_;
  std::vector<Place>& places_;
  std::vector<int64_t>& labels_;
  std::string key_;
  std::optional<Place> image_;
  std::optional<int64_t> label_;
  std::vector<uint8_t> bytes_;
};

class TarShards : public detail::ImageSet {
 public:
  TarShards(const TarShardsOptions& options, Split split)
      : ImageSet("tar_shards", options, split, /*channels=*/3, std::nullopt),
        decode_(detail::decode_options(options)),
        classes_(options.classes) {
    const std::string& pattern = split == Split::kTest ? options.test : options.train;
    for (const std::string& name : detail::expand_braces(pattern)) {
      shards_.push_back({name, detail::open_file(name)});
      const auto number = static_cast<int32_t>(shards_.size() - 1);
      ShardIndexer(shards_.back(), number, classes_, places_, labels_).run();
    }
    if (places_.empty()) {
      throw base::UserError(fmt::format("tar_shards: there is no sample in '{}'", pattern));
    }
  }

  int64_t size() const override { return std::ssize(places_); }
  std::span<const int64_t> labels() const override { return labels_; }
  int64_t num_classes() const override { return classes_; }

  uint64_t fingerprint() const override {
    base::Fnv1a hash;
    for (size_t i = 0; i < places_.size(); ++i) {
      hash.add(static_cast<uint64_t>(places_[i].offset));
      hash.add(static_cast<uint64_t>(places_[i].size));
      hash.add(static_cast<uint64_t>(labels_[i]));
    }
    return hash.value();
  }

  std::string name_of(int64_t index) const override {
    const Place& place = places_[static_cast<size_t>(index)];
    return fmt::format("{} at byte {}", shards_[static_cast<size_t>(place.shard)].path.string(),
                       place.offset);
  }

  void read_sample(int64_t index, SampleRandom& random, const SampleSlot& slot) const override {
    auto& bytes = detail::thread_buffer();
    const Place& place = places_[static_cast<size_t>(index)];
    const Shard& shard = shards_[static_cast<size_t>(place.shard)];
    detail::read_at(shard.file, shard.path, place.offset, place.size, bytes);
    ImageDecoder decoder(bytes, name_of(index), decode_);
    put(pipeline().run(decoder, random), slot.data);
    slot.target[0] = labels_[static_cast<size_t>(index)];
  }

 private:
  DecodeOptions decode_;
  int64_t classes_;
  std::vector<Shard> shards_;
  std::vector<Place> places_;
  std::vector<int64_t> labels_;
};

}  // namespace

void TarShardsOptions::describe(config::Schema<TarShardsOptions>& schema) {
  schema.field("train", &TarShardsOptions::train, "the shards, such as train-{000000..000099}.tar")
      .required();
  schema.field("test", &TarShardsOptions::test, "the test split's shards").required();
  schema.field("classes", &TarShardsOptions::classes, "labels are below this")
      .required()
      .at_least(1)
      .at_most(1'000'000);
  detail::describe_image_files(schema);
}

std::shared_ptr<const Dataset> load_tar_shards(const TarShardsOptions& options, Split split) {
  return std::make_shared<const TarShards>(options, split);
}

}  // namespace syncbn::data
