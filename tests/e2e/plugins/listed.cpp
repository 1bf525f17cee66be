// A data set of image files listed in a CSV file: `data: {type: listed, train: …, test: …}`.
#include <fmt/format.h>
#include <syncbn/base/atomic_file.h>
#include <syncbn/base/error.h>
#include <syncbn/base/hash.h>
#include <syncbn/base/text.h>
#include <syncbn/data/batch_transforms.h>
#include <syncbn/data/image_sets.h>
#include <syncbn/data/sample_dataset.h>
#include <syncbn/train/plugin.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <sstream>
#include <string>
#include <vector>

namespace {

using namespace syncbn;

/// The library handles decoding, `transforms`, `mean` and `std`; describe() names the YAML keys.
struct ListedOptions : data::ImageSetOptions {
  std::string train;
  std::string test;

  static void describe(config::Schema<ListedOptions>& schema) {
    schema.field("train", &ListedOptions::train, "CSV file of image,class").required();
    schema.field("test", &ListedOptions::test, "the same, for evaluation").required();
    schema.field("transforms", &ListedOptions::transforms, "for training");
    schema.field("test_transforms", &ListedOptions::test_transforms, "for evaluation");
    schema.field("mean", &ListedOptions::mean, "one value per channel");
    schema.field("std", &ListedOptions::std, "one value per channel");
  }
};

/// Images [3, H, W] of the size that the transforms produce. Paths are relative to the CSV file.
class Listed : public data::SampleDataset {
 public:
  Listed(const ListedOptions& options, bool is_train)
      : normalization_{options.mean, options.std},
        pipeline_(is_train ? options.transforms : options.test_transforms) {
    const std::filesystem::path list = is_train ? options.train : options.test;
    std::istringstream lines(base::read_file(list));
    for (std::string line; std::getline(lines, line);) {
      const size_t comma = line.rfind(',');
      const auto label = base::parse_number<int64_t>(line.substr(comma + 1));
      if (comma == line.npos || !label || *label < 0) {
        throw base::UserError(
            fmt::format("{}: expected image,class, got '{}'", list.string(), line));
      }
      files_.push_back(list.parent_path() / line.substr(0, comma));
      labels_.push_back(*label);
      hash_.add_bytes(line);
    }
    if (labels_.empty()) throw base::UserError(list.string() + " is empty");
    if (!pipeline_.size()) throw base::UserError("data: transforms must end with one size");
  }

  int64_t size() const override { return std::ssize(files_); }
  int64_t num_classes() const override { return *std::ranges::max_element(labels_) + 1; }
  std::span<const int64_t> labels() const override { return labels_; }
  std::vector<int64_t> sample_shape() const override {
    return {3, pipeline_.size()->height, pipeline_.size()->width};
  }
  data::Normalization normalization() const override { return normalization_; }
  uint64_t fingerprint() const override { return hash_.value(); }
  std::string name_of(int64_t index) const override { return path_of(index); }

  void read_sample(int64_t index, data::SampleRandom& random,
                   const data::SampleSlot& slot) const override {
    const std::string bytes = base::read_file(path_of(index));
    data::ImageDecoder decoder({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()},
                               path_of(index));
    const data::Image image = pipeline_.run(decoder, random);
    const size_t pixels = slot.data.size() / 3;
    for (size_t i = 0; i < slot.data.size(); ++i) {  // [H, W, C] to [C, H, W]
      slot.data[i % 3 * pixels + i / 3] = image.pixels[i];
    }
    slot.target[0] = labels_[static_cast<size_t>(index)];
  }

 private:
  const std::string& path_of(int64_t index) const { return files_[static_cast<size_t>(index)]; }

  data::Normalization normalization_;
  data::Pipeline pipeline_;
  std::vector<std::string> files_;
  std::vector<int64_t> labels_;
  base::Fnv1a hash_;
};

void register_listed() {
  data::DatasetKind::registry().add<ListedOptions>(
      "listed", "image files that a CSV file lists",
      [](const ListedOptions& options, data::Split split) -> std::shared_ptr<const data::Dataset> {
        const bool is_test = split == data::Split::kTest;
        if (!is_test && split != data::Split::kTrain) return nullptr;
        return std::make_shared<Listed>(options, !is_test);
      });
}

}  // namespace

SYNCBN_PLUGIN(register_listed);
