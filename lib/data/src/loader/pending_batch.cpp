#include "loader/pending_batch.h"

#include <fmt/format.h>

namespace syncbn::data::detail {

BatchMaker::BatchMaker(std::shared_ptr<const Dataset> dataset)
    : dataset_(std::move(dataset)), samples_(dynamic_cast<const SampleDataset*>(dataset_.get())) {}

std::exception_ptr BatchMaker::run(PendingBatch& batch, int64_t job) const noexcept {
  try {
    if (samples_ == nullptr) {
      batch.slot = dataset_->get_batch(batch.indices);
      return nullptr;
    }
    if (job == 0 && !batch.ahead.empty()) samples_->prefetch(batch.ahead);
    const auto place = static_cast<size_t>(job);
    SampleRandom random(batch.seed, batch.epoch, batch.random_keys[place]);
    samples_->read_sample(batch.indices[place], random, SampleDataset::slot_of(batch.slot, job));
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

std::string BatchMaker::describe(int64_t index) const {
  if (samples_ == nullptr) return fmt::format("sample {}", index);
  return fmt::format("sample {} ({})", index, samples_->name_of(index));
}

}  // namespace syncbn::data::detail
