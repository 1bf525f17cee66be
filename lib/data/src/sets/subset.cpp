#include <syncbn/data/subset.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <utility>

#include <syncbn/base/hash.h>
#include <syncbn/data/boxes.h>

#include "sets/gather.h"

namespace syncbn::data {
namespace {

/// `Base` is Dataset, SampleDataset or BoxDataset.
template <class Base>
class Subset : public Base {
 public:
  Subset(std::shared_ptr<const Base> dataset, std::vector<int64_t> indices)
      : dataset_(std::move(dataset)), indices_(std::move(indices)) {
    check_indices(indices_, dataset_->size());
    base::Fnv1a hash;
    hash.add(dataset_->fingerprint());
    for (const int64_t index : indices_) hash.add(static_cast<uint64_t>(index));
    fingerprint_ = hash.value();
    if (const auto all = dataset_->labels(); !all.empty()) {
      for (const int64_t index : indices_) labels_.push_back(all[static_cast<size_t>(index)]);
    }
    for (const int64_t end : dataset_->shard_ends()) {
      shard_ends_.push_back(
          std::ranges::count_if(indices_, [&](int64_t index) { return index < end; }));
    }
  }

  int64_t size() const override { return std::ssize(indices_); }
  Batch get_batch(std::span<const int64_t> indices) const override {
    return dataset_->get_batch(of_dataset(indices));
  }
  std::span<const int64_t> labels() const override { return labels_; }
  int64_t num_classes() const override { return dataset_->num_classes(); }
  std::vector<std::string> class_names() const override { return dataset_->class_names(); }
  std::span<const int64_t> shard_ends() const override { return shard_ends_; }
  std::vector<int64_t> sample_shape() const override { return dataset_->sample_shape(); }
  bool sizes_vary() const override { return dataset_->sizes_vary(); }
  Normalization normalization() const override { return dataset_->normalization(); }
  uint64_t fingerprint() const override { return fingerprint_; }
  std::vector<Remark> remarks() const override { return dataset_->remarks(); }

 protected:
  const Base& dataset() const { return *dataset_; }
  int64_t of_dataset(int64_t index) const { return indices_[static_cast<size_t>(index)]; }
  std::vector<int64_t> of_dataset(std::span<const int64_t> indices) const {
    check_indices(indices, size());
    std::vector<int64_t> found;
    for (const int64_t index : indices) found.push_back(of_dataset(index));
    return found;
  }

 private:
  std::shared_ptr<const Base> dataset_;
  std::vector<int64_t> indices_;
  std::vector<int64_t> labels_;
  std::vector<int64_t> shard_ends_;
  uint64_t fingerprint_ = 0;
};

template <class Base>
class SampleSubset : public Subset<Base> {
 public:
  using Subset<Base>::Subset;

  void read_sample(int64_t index, SampleRandom& random, const SampleSlot& slot) const override {
    dataset().read_sample(of_dataset(index), random, slot);
  }
  void prefetch(std::span<const int64_t> indices) const override {
    dataset().prefetch(of_dataset(indices));
  }
  std::vector<int64_t> target_shape() const override { return dataset().target_shape(); }
  int64_t ignore_index() const override { return dataset().ignore_index(); }
  SampleFacts facts(int64_t index) const override { return dataset().facts(of_dataset(index)); }
  std::string name_of(int64_t index) const override { return dataset().name_of(of_dataset(index)); }

 protected:
  using Subset<Base>::dataset;
  using Subset<Base>::of_dataset;
};

class BoxSubset : public SampleSubset<BoxDataset> {
 public:
  using SampleSubset::SampleSubset;

  std::span<const Annotation> annotations(int64_t index) const override {
    return dataset().annotations(of_dataset(index));
  }
  int64_t image_id(int64_t index) const override { return dataset().image_id(of_dataset(index)); }
  int64_t category_id(int64_t label) const override { return dataset().category_id(label); }
  ImageSize original_size(int64_t index) const override {
    return dataset().original_size(of_dataset(index));
  }
  const BoxDataset& whole() const override { return dataset().whole(); }
};

}  // namespace

std::shared_ptr<const Dataset> subset(std::shared_ptr<const Dataset> dataset,
                                      std::vector<int64_t> indices) {
  if (auto boxes = std::dynamic_pointer_cast<const BoxDataset>(dataset)) {
    return std::make_shared<const BoxSubset>(std::move(boxes), std::move(indices));
  }
  if (auto samples = std::dynamic_pointer_cast<const SampleDataset>(dataset)) {
    return std::make_shared<const SampleSubset<SampleDataset>>(std::move(samples),
                                                               std::move(indices));
  }
  return std::make_shared<const Subset<Dataset>>(std::move(dataset), std::move(indices));
}

HeldOut hold_out(int64_t size, std::span<const int64_t> labels, double share) {
  HeldOut parts;
  std::map<int64_t, double> seen;
  for (int64_t index = 0; index < size; ++index) {
    double& before = seen[labels.empty() ? 0 : labels[static_cast<size_t>(index)]];
    const bool is_held_out = std::floor((before + 1) * share) > std::floor(before * share);
    ++before;
    (is_held_out ? parts.held_out : parts.train).push_back(index);
  }
  return parts;
}

}  // namespace syncbn::data
