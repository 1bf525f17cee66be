#include <syncbn/data/dataset.h>

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>

#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <syncbn/data/boxes.h>
#include <syncbn/data/digits.h>
#include <syncbn/data/image_sets.h>
#include <syncbn/data/sample_dataset.h>
#include <syncbn/data/synthetic.h>

#include "sets/gather.h"

namespace syncbn::data {
namespace {

std::vector<int64_t> with_batch(int64_t size, std::vector<int64_t> shape) {
  shape.insert(shape.begin(), size);
  return shape;
}

/// The side of a batch whose largest image has this side.
int64_t padded_side(int64_t side, int64_t limit) {
  constexpr int64_t kDivisor = 32;  // torchvision's size_divisible
  return std::min((side + kDivisor - 1) / kDivisor * kDivisor, limit);
}

/// Copies [H, W] or [C, H, W] images of these sizes to a batch of this height and width, with
/// `fill` outside of them.
at::Tensor cut_out(const at::Tensor& slots, const at::Tensor& sizes, int64_t height, int64_t width,
                   int64_t fill) {
  std::vector<int64_t> shape = slots.sizes().vec();
  shape[shape.size() - 2] = height;
  shape.back() = width;
  at::Tensor made = at::empty(shape, slots.options().pinned_memory(slots.is_pinned())).fill_(fill);
  const auto* size = sizes.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < slots.size(0); ++i, size += 2) {
    const auto image = [&](const at::Tensor& of) {
      return of[i].narrow(-2, 0, size[0]).narrow(-1, 0, size[1]);
    };
    image(made).copy_(image(slots));
  }
  return made;
}

}  // namespace

std::string to_string(Split split) {
  constexpr std::array kNames = {"train", "val", "test", "held-out"};
  return kNames.at(static_cast<size_t>(split));
}

Normalization Dataset::normalization() const {
  const auto shape = sample_shape();
  const auto channels = static_cast<size_t>(shape.empty() ? 1 : shape.front());
  return {std::vector<double>(channels, 0.0), std::vector<double>(channels, 1.0)};
}

std::string SampleDataset::name_of(int64_t index) const {
  return fmt::format("sample {}", index);
}

Batch SampleDataset::get_batch(std::span<const int64_t> indices) const {
  check_indices(indices, size());
  Batch batch = allocate(std::ssize(indices));
  for (int64_t place = 0; place < std::ssize(indices); ++place) {
    const int64_t index = indices[static_cast<size_t>(place)];
    SampleRandom random(0, 0, index);
    read_sample(index, random, slot_of(batch, place));
  }
  return trimmed(batch);
}

Batch SampleDataset::allocate(int64_t size, bool pin_memory) const {
  const auto options = at::TensorOptions().pinned_memory(pin_memory);
  return {at::empty(with_batch(size, sample_shape()), options.dtype(at::kByte)),
          at::empty(with_batch(size, target_shape()), options.dtype(at::kLong)),
          sizes_vary() ? at::empty({size, 2}, at::kLong) : at::Tensor()};
}

SampleSlot SampleDataset::slot_of(const Batch& batch, int64_t place) {
  const int64_t count = batch.size();
  const int64_t values = batch.data.numel() / count;
  const int64_t labels = batch.target.numel() / count;
  return {{batch.data.mutable_data_ptr<uint8_t>() + place * values, static_cast<size_t>(values)},
          {batch.target.mutable_data_ptr<int64_t>() + place * labels, static_cast<size_t>(labels)},
          batch.sizes.defined() ? std::span(batch.sizes.mutable_data_ptr<int64_t>() + 2 * place, 2)
                                : std::span<int64_t>()};
}

Batch SampleDataset::trimmed(const Batch& batch) const {
  if (!batch.sizes.defined()) return batch;
  int64_t height = batch.data.size(-2);
  int64_t width = batch.data.size(-1);
  if (batch.size() > 0) {
    const at::Tensor largest = batch.sizes.amax(0);
    height = padded_side(largest[0].item<int64_t>(), height);
    width = padded_side(largest[1].item<int64_t>(), width);
  }
  Batch trimmed = batch;
  trimmed.data = cut_out(batch.data, batch.sizes, height, width, 0);
  if (labels_pixels(*this)) {
    trimmed.target = cut_out(batch.target, batch.sizes, height, width, ignore_index());
  }
  trimmed.sizes = batch.sizes.clone();
  return trimmed;
}

void check_indices(std::span<const int64_t> indices, int64_t size) {
  for (const int64_t index : indices) {
    if (index >= 0 && index < size) continue;
    throw base::InternalError(fmt::format("sample {} was asked for from a data set of {}", index,
                                          base::counted(size, "sample")));
  }
}

at::Tensor gather_labels(std::span<const int64_t> labels, std::span<const int64_t> indices) {
  at::Tensor target = at::empty({static_cast<int64_t>(indices.size())}, at::kLong);
  auto* out = target.mutable_data_ptr<int64_t>();
  for (const int64_t index : indices) *out++ = labels[static_cast<size_t>(index)];
  return target;
}

DatasetKind::Registry& DatasetKind::registry() {
  static Registry registry = [] {
    Registry made("data set");
    made.add<DigitsOptions>("digits", "UCI's handwritten digits, 1 x 8 x 8, ten classes",
                            load_digits);
    made.add<SyntheticOptions>("synthetic", "random images with a learnable class signal",
                               make_synthetic);
    made.add<MnistOptions>("mnist", "MNIST's or Fashion-MNIST's idx files", load_mnist);
    made.add<CifarOptions>("cifar10", "CIFAR-10's binary files", load_cifar10);
    made.add<CifarOptions>("cifar100", "CIFAR-100's binary files, the fine labels", load_cifar100);
    made.add<CsvImagesOptions>("csv_images", "one grey image and its label per line",
                               load_csv_images);
    made.add<ImageFolderOptions>("image_folder", "JPEG and PNG files, a folder per class",
                                 load_image_folder);
    made.add<SegmentationFolderOptions>("segmentation_folder", "images and masks of the same name",
                                        load_segmentation_folder);
    made.add<VocSegmentationOptions>("voc_segmentation", "PASCAL VOC's images and masks",
                                     load_voc_segmentation);
    made.add<CocoOptions>("coco", "images with boxes around objects, in COCO's format", load_coco);
    made.add<TarShardsOptions>("tar_shards", "tar files as webdataset writes them",
                               load_tar_shards);
    return made;
  }();
  return registry;
}

bool labels_pixels(const Dataset& dataset) {
  const auto* const samples = dynamic_cast<const SampleDataset*>(&dataset);
  const bool has_boxes = dynamic_cast<const BoxDataset*>(&dataset) != nullptr;
  return samples != nullptr && !has_boxes && !samples->target_shape().empty();
}

}  // namespace syncbn::data
