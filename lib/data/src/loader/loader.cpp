#include <syncbn/data/loader.h>

#include <ATen/ops/tensor.h>
#include <fmt/format.h>
#include <syncbn/base/log.h>

#include <algorithm>
#include <bit>

#include <syncbn/base/error.h>
#include <syncbn/base/text.h>
#include <syncbn/data/distributed_sampler.h>

#include "loader/loader_options.h"
#include "loader/pending_batch.h"
#include "loader/saved_place.h"
#include "loader/worker_pool.h"

namespace syncbn::data {
namespace {

using Clock = std::chrono::steady_clock;
using detail::PendingBatch;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

/// Whether only `tensor` itself holds its memory.
bool is_free(const at::Tensor& tensor) {
  return tensor.use_count() == 1 && tensor.storage().use_count() == 1;
}

bool is_user_error(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const base::UserError&) {
    return true;
  } catch (...) {
    return false;
  }
}

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return known.what();
  }
}

std::shared_ptr<Sampler> sampler_of(const Dataset& dataset, const LoaderOptions& options) {
  return std::make_shared<DistributedSampler>(
      dataset.size(),
      DistributedSamplerOptions{.shuffle = options.shuffle.value_or(false), .seed = options.seed});
}

/// The options for a loader whose sampler was made from them.
LoaderOptions without_shuffle(LoaderOptions options) {
  options.shuffle.reset();
  return options;
}

}  // namespace

Loader::Loader(const std::shared_ptr<const Dataset>& dataset, const LoaderOptions& options)
    : Loader(dataset, sampler_of(*dataset, options), without_shuffle(options)) {}

Loader::Loader(std::shared_ptr<const Dataset> dataset, std::shared_ptr<Sampler> sampler,
               const LoaderOptions& options)
    : dataset_(std::move(dataset)),
      sampler_(std::move(sampler)),
      options_(options),
      batch_size_(detail::choose_batch_size(options, sampler_->num_replicas())),
      pins_(detail::pins_memory(options)),
      maker_(std::make_shared<const detail::BatchMaker>(dataset_)) {
  detail::check(options);
  if (options.shuffle) {
    throw base::UserError(
        "a loader was given a sampler together with shuffle; the sampler has the order, so shuffle "
        "is its option");
  }
  int workers = options.num_workers;
  // Other data sets only gather what lies in memory, which a thread would not hasten.
  if (workers == kAutoWorkers) workers = maker_->samples() != nullptr ? automatic_workers() : 0;
  if (workers > 0) pool_ = std::make_unique<detail::WorkerPool>(maker_, workers);
}

Loader::~Loader() = default;
Loader::Loader(Loader&&) noexcept = default;
Loader& Loader::operator=(Loader&&) noexcept = default;

int64_t Loader::usable() const {
  const int64_t all = sampler_->size();
  return options_.drop_last ? all - all % batch_size_ : all;
}

int64_t Loader::num_batches() const {
  return (usable() + batch_size_ - 1) / batch_size_;
}

void Loader::start_epoch(int64_t epoch) {
  go_to(epoch, 0);
}

void Loader::go_to(int64_t epoch, int64_t position) {
  if (pool_) pool_->clear();
  pending_.clear();
  sampler_->set_epoch(epoch);
  order_ = sampler_->indices();
  storage_order_ = sampler_->storage_order(order_);
  order_.resize(static_cast<size_t>(usable()));
  position_ = scheduled_ = asked_for_ = position;
  skipped_ = 0;
  // The first batches are made while the caller does something else.
  if (pool_) schedule(options_.prefetch);
}

void Loader::schedule(int64_t batches) {
  const int64_t size = dataset_->size();
  while (std::ssize(pending_) < batches && scheduled_ < std::ssize(order_)) {
    auto pending = std::make_shared<PendingBatch>();
    const int64_t end = std::min(scheduled_ + batch_size_, std::ssize(order_));
    for (int64_t place = scheduled_; place < end; ++place) {
      const int64_t index = order_[static_cast<size_t>(place)];
      pending->indices.push_back(index);
      pending->random_keys.push_back(index + sampler_->copy_at(place) * size);
    }
    pending->seed = sampler_->seed();
    pending->epoch = sampler_->epoch();
    pending->jobs = maker_->samples() != nullptr ? end - scheduled_ : 1;
    if (maker_->samples() != nullptr) {
      pending->ahead = take_ahead();
      pending->slot = free_slot();
      if (end - scheduled_ < batch_size_) {
        pending->slot = {pending->slot.data.narrow(0, 0, end - scheduled_),
                         pending->slot.target.narrow(0, 0, end - scheduled_)};
      }
    }
    scheduled_ = end;
    pending_.push_back(pending);
    if (pool_) pool_->add(std::move(pending));
  }
}

std::vector<int64_t> Loader::take_ahead() {
  // In pieces: large ones are read faster, and one at a time lets the first batch wait less.
  constexpr int64_t kBatchesAtOnce = 4;
  const int64_t all = std::ssize(storage_order_);
  const int64_t end = std::min(asked_for_ + kBatchesAtOnce * batch_size_, all);
  // By where a piece begins, which may be longer than what storage is to be ahead.
  const bool is_far_enough = asked_for_ > scheduled_ + batch_size_ + sampler_->read_ahead();
  if (end <= asked_for_ || is_far_enough) return {};
  const auto begin = storage_order_.begin();
  std::vector<int64_t> ahead(begin + asked_for_, begin + end);
  asked_for_ = end;
  return ahead;
}

/// Memory for a batch: that of one that nobody holds any more, or new.
Batch Loader::free_slot() {
  // Pinned memory is kept by torch, which knows when the GPU has read it; we do not.
  if (pins_) return maker_->samples()->allocate(batch_size_, /*pin_memory=*/true);
  for (const Batch& slot : slots_) {
    if (is_free(slot.data) && is_free(slot.target)) return slot;
  }
  slots_.push_back(maker_->samples()->allocate(batch_size_));
  return slots_.back();
}

std::optional<Batch> Loader::next() {
  const auto begin = Clock::now();
  schedule(pool_ ? options_.prefetch : 1);
  if (pending_.empty()) return std::nullopt;
  finish(*pending_.front());
  const std::shared_ptr<PendingBatch> pending = std::move(pending_.front());
  pending_.pop_front();
  position_ += std::ssize(pending->indices);
  if (pool_) schedule(options_.prefetch);
  Batch batch = pinned(take(*pending));
  wait_seconds_ = seconds_since(begin);
  return batch;
}

/// Makes the batch, or waits until the workers have.
void Loader::finish(PendingBatch& pending) {
  if (!pool_) {
    for (int64_t job = 0; job < pending.jobs; ++job) {
      if (auto error = maker_->run(pending, job)) pending.faults.push_back({job, std::move(error)});
    }
    return;
  }
  if (pool_->wait(pending, options_.timeout)) return;
  throw base::UnavailableError(fmt::format(
      "no batch for {}: {} is not ready; a disk or file server hangs, or the timeout is too short",
      base::format_seconds(std::chrono::duration<double>(options_.timeout).count()),
      maker_->describe(pool_->unfinished(pending))));
}

Batch Loader::take(PendingBatch& pending) {
  // By place, whichever thread met its fault first.
  std::ranges::sort(pending.faults, {}, &PendingBatch::Fault::place);
  for (const auto& [place, error] : pending.faults) {
    if (maker_->samples() == nullptr || !is_user_error(error)) std::rethrow_exception(error);
    const std::string text = fmt::format(
        "{}: {}", maker_->describe(pending.indices[static_cast<size_t>(place)]), message_of(error));
    if (options_.on_error == LoaderOptions::OnError::kRaise) throw base::UserError(text);
    ++skipped_;
    const double budget = options_.error_budget * static_cast<double>(order_.size());
    if (static_cast<double>(skipped_) > budget) {
      throw base::UserError(fmt::format(
          "{} of the epoch's {} could not be read, more than the {:.3g} % that may be left "
          "out; the last is {}",
          skipped_, base::counted(order_.size(), "sample"), 100 * options_.error_budget, text));
    }
    spdlog::warn("left out: {}", text);
    if (std::ssize(pending.faults) == std::ssize(pending.indices)) {
      throw base::UserError("no sample of a batch could be read; one is " + text);
    }
  }
  return pending.faults.empty() ? pending.slot : without_faults(pending);
}

/// Batches that were not made in pinned memory, copied to it where it is wanted.
Batch Loader::pinned(Batch batch) const {
  if (!pins_ || batch.data.is_pinned()) return batch;
  return {batch.data.pin_memory(), batch.target.pin_memory()};
}

/// The samples that were made, in memory of their own.
Batch Loader::without_faults(PendingBatch& pending) {
  std::vector<int64_t> good;
  auto fault = pending.faults.begin();
  for (int64_t place = 0; place < std::ssize(pending.indices); ++place) {
    if (fault != pending.faults.end() && fault->place == place) {
      ++fault;
    } else {
      good.push_back(place);
    }
  }
  const at::Tensor places = at::tensor(good, at::kLong);
  return {pending.slot.data.index_select(0, places), pending.slot.target.index_select(0, places)};
}

SamplerState Loader::state() const {
  return {.seed = sampler_->seed(),
          .epoch = sampler_->epoch(),
          .consumed = position_ * sampler_->num_replicas(),
          .fingerprint = std::bit_cast<int64_t>(dataset_->fingerprint()),
          .order = sampler_->order_name()};
}

void Loader::resume(const SamplerState& state) {
  detail::check_saved_place(state, *dataset_, *sampler_, usable());
  go_to(state.epoch, state.consumed / sampler_->num_replicas());
}

}  // namespace syncbn::data
