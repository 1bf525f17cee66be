#include <fmt/format.h>

#include <syncbn/base/error.h>

#include "sets/file_bytes.h"
#include "sets/image_set.h"
#include "sets/shard_index.h"

namespace syncbn::data {
namespace {

namespace fs = std::filesystem;

std::vector<detail::OpenFiles::Named> with_stamps(const std::vector<fs::path>& paths,
                                                  std::span<const detail::FileStamp> stamps) {
  std::vector<detail::OpenFiles::Named> shards;
  shards.reserve(paths.size());
  for (size_t i = 0; i < paths.size(); ++i) shards.push_back({paths[i], stamps[i]});
  return shards;
}

class TarShards : public detail::ImageSet {
 public:
  TarShards(const TarShardsOptions& options, Split split, const std::vector<fs::path>& paths,
            detail::ShardIndex index)
      : ImageSet("tar_shards", options, split, /*channels=*/3, std::nullopt),
        decode_(detail::decode_options(options)),
        classes_(options.classes),
        index_(std::move(index)),
        shards_(with_stamps(paths, index_.stamps())) {}

  int64_t size() const override { return index_.size(); }
  std::span<const int64_t> labels() const override { return index_.labels(); }
  int64_t num_classes() const override { return classes_; }

  std::span<const int64_t> shard_ends() const override { return index_.shard_ends(); }
  uint64_t fingerprint() const override { return index_.fingerprint(); }

  std::string name_of(int64_t index) const override {
    const auto& place = index_[index];
    return fmt::format("{} at byte {}", shards_.path(place.shard).string(), place.offset);
  }

  void read_sample(int64_t index, SampleRandom& random, const SampleSlot& slot) const override {
    auto& bytes = detail::thread_buffer();
    const auto& place = index_[index];
    const auto shard = shards_.open(place.shard);
    detail::read_at(*shard, shards_.path(place.shard), static_cast<int64_t>(place.offset),
                    place.size, bytes);
    ImageDecoder decoder(bytes, name_of(index), decode_);
    put(pipeline().run(decoder, random), slot.data);
    slot.target[0] = index_.labels()[static_cast<size_t>(index)];
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
  DecodeOptions decode_;
  int64_t classes_;
  detail::ShardIndex index_;
  detail::OpenFiles shards_;
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
  const std::string& pattern = split == Split::kTest ? options.test : options.train;
  std::vector<fs::path> paths;
  for (const std::string& name : detail::expand_braces(pattern)) paths.emplace_back(name);
  auto index = detail::index_shards(paths, options.classes, pattern, {.folder = options.cache_dir});
  return std::make_shared<const TarShards>(options, split, paths, std::move(index));
}

}  // namespace syncbn::data
