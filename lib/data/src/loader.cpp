#include <syncbn/data/loader.h>

#include <fmt/format.h>

#include <algorithm>
#include <bit>

#include <syncbn/base/error.h>

namespace syncbn::data {

Loader::Loader(std::shared_ptr<const Dataset> dataset, std::shared_ptr<Sampler> sampler,
               const LoaderOptions& options)
    : dataset_(std::move(dataset)), sampler_(std::move(sampler)), options_(options) {
  if (options.batch_size < 1) {
    throw base::UserError(fmt::format("batch_size must be at least 1, got {}", options.batch_size));
  }
}

int64_t Loader::usable() const {
  const int64_t all = sampler_->size();
  return options_.drop_last ? all - all % options_.batch_size : all;
}

int64_t Loader::num_batches() const {
  return (usable() + options_.batch_size - 1) / options_.batch_size;
}

void Loader::start_epoch(int64_t epoch) {
  sampler_->set_epoch(epoch);
  order_ = sampler_->indices();
  order_.resize(static_cast<size_t>(usable()));
  position_ = 0;
}

std::optional<Batch> Loader::next() {
  const int64_t count = std::min(options_.batch_size, std::ssize(order_) - position_);
  if (count <= 0) return std::nullopt;
  const std::span<const int64_t> order(order_);
  Batch batch = dataset_->get_batch(
      order.subspan(static_cast<size_t>(position_), static_cast<size_t>(count)));
  position_ += count;
  return batch;
}

SamplerState Loader::state() const {
  return {.seed = sampler_->seed(),
          .epoch = sampler_->epoch(),
          .consumed = position_ * sampler_->num_replicas(),
          .fingerprint = std::bit_cast<int64_t>(dataset_->fingerprint())};
}

void Loader::resume(const SamplerState& state) {
  const auto refuse = [](const std::string& why) {
    throw base::UserError("cannot go on at the saved place in the data: " + why);
  };
  if (state.version != SamplerState::kVersion) {
    refuse(fmt::format("it was saved in format {}, this program reads format {}", state.version,
                       SamplerState::kVersion));
  }
  if (std::bit_cast<uint64_t>(state.fingerprint) != dataset_->fingerprint()) {
    refuse("the data set is not the one it was saved with");
  }
  if (state.seed != sampler_->seed()) {
    refuse(fmt::format("it was saved with seed {}, this run has seed {}", state.seed,
                       sampler_->seed()));
  }
  const int64_t replicas = sampler_->num_replicas();
  if (state.consumed < 0 || state.consumed % replicas != 0 ||
      state.consumed / replicas > usable()) {
    refuse(
        fmt::format("{} samples of the epoch were taken, which {} ranks with {} samples each "
                    "cannot have",
                    state.consumed, replicas, usable()));
  }
  start_epoch(state.epoch);
  position_ = state.consumed / replicas;
}

}  // namespace syncbn::data
