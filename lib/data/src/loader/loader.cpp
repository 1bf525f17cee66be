#include <syncbn/data/loader.h>

#include <ATen/Context.h>
#include <ATen/ops/tensor.h>
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <mutex>

#include <syncbn/base/clock.h>
#include <syncbn/base/cpus.h>
#include <syncbn/base/env.h>
#include <syncbn/base/error.h>
#include <syncbn/base/log.h>
#include <syncbn/base/text.h>
#include <syncbn/data/distributed_sampler.h>

#include "loader/worker_pool.h"

namespace syncbn::data {
namespace {

using detail::PendingBatch;

/// This rank's samples per batch.
int64_t choose_batch_size(const LoaderOptions& options, int num_replicas) {
  if (options.batch_size && options.global_batch_size) {
    throw base::UserError(
        fmt::format("batch_size {} (of each rank) and global_batch_size {} (of all) were both "
                    "given; give one of them",
                    *options.batch_size, *options.global_batch_size));
  }
  const int64_t all = options.global_batch_size.value_or(num_replicas);
  if (options.global_batch_size && (all < 1 || all % num_replicas != 0)) {
    throw base::UserError(fmt::format("global_batch_size {} is not a multiple of the {}", all,
                                      base::counted(num_replicas, "rank")));
  }
  const int64_t own = options.batch_size.value_or(all / num_replicas);
  if (own < 1) throw base::UserError(fmt::format("batch_size must be at least 1, got {}", own));
  return own;
}

void check_ranges(const LoaderOptions& options) {
  const auto check = [](bool is_right, const char* rule, auto value) {
    if (!is_right) throw base::UserError(fmt::format("{}, got {}", rule, value));
  };
  const double budget = options.error_budget;
  check(options.num_workers >= kAutoWorkers, "num_workers must be at least 0", options.num_workers);
  check(options.prefetch >= 1, "prefetch must be at least 1", options.prefetch);
  check(budget >= 0 && budget <= 1, "error_budget must be from 0 to 1", budget);
}

/// Warns once if the options ask for pinned memory and there is no GPU.
bool pins_memory(const LoaderOptions& options) {
  if (!options.pin_memory) return false;
  if (at::hasCUDA()) return true;
  static std::once_flag warned;
  std::call_once(warned, [] { spdlog::warn("pin_memory changes nothing: there is no GPU"); });
  return false;
}

[[noreturn]] void refuse(const std::string& why) {
  throw base::UserError("the position in the data: " + why);
}

void check_resumable(const SamplerState& state, const Dataset& dataset, const Sampler& sampler) {
  if (state.version < 1 || state.version > SamplerState::kVersion) {
    refuse(fmt::format("it was saved in format {}, this program reads formats 1 to {}",
                       state.version, SamplerState::kVersion));
  }
  if (std::bit_cast<uint64_t>(state.fingerprint) != dataset.fingerprint()) {
    refuse(
        "the training data is not what it was saved with (files, labels or annotations); to train "
        "on other data, begin a run with its weights");
  }
  if (state.seed != sampler.seed()) {
    refuse(
        fmt::format("it was saved with seed {}, this run has seed {}", state.seed, sampler.seed()));
  }
  // The order may change at the beginning of an epoch.
  const std::string order = sampler.order_name();
  if (state.consumed != 0 && !state.order.empty() && state.order != order) {
    refuse(fmt::format(
        "it is in the middle of an epoch in the order '{}', this run's is '{}'; restore the "
        "sampler's options and the number of ranks, or resume at the beginning of an epoch",
        state.order, order.empty() ? "unknown" : order));
  }
  if (state.consumed < 0) refuse(fmt::format("{} samples were consumed", state.consumed));
  const int64_t replicas = sampler.num_replicas();
  if (state.consumed % replicas != 0 && !sampler.share()) {
    refuse(fmt::format(
        "{} samples of the epoch were consumed, not a multiple of {}, and this sampler's ranks do "
        "not share one list (Sampler::share())",
        state.consumed, base::counted(replicas, "rank")));
  }
}

/// Whether no other tensor shares the memory.
bool is_free(const at::Tensor& tensor) {
  return tensor.use_count() == 1 && tensor.storage().use_count() == 1;
}

std::shared_ptr<Sampler> sampler_of(const Dataset& dataset, const LoaderOptions& options) {
  return std::make_shared<DistributedSampler>(
      dataset.size(), DistributedSamplerOptions{.num_replicas = 1,
                                                .rank = 0,
                                                .shuffle = options.shuffle.value_or(false),
                                                .seed = options.seed});
}

LoaderOptions without_shuffle(LoaderOptions options) {
  options.shuffle.reset();
  return options;
}

/// Replaces each tensor of a batch by change(tensor).
template <class Change>
void change_each(Batch& batch, const Change& change) {
  batch.data = change(batch.data);
  batch.target = change(batch.target);
  if (batch.sizes.defined()) batch.sizes = change(batch.sizes);
}

/// The samples that were made: the slot itself, or a copy without damaged ones. Faults are sorted
/// by place.
Batch good_samples(const PendingBatch& pending) {
  constexpr int64_t kOtherThanTransforms = 0x6261746368;
  Batch batch = pending.slot;
  std::vector<int64_t> good;
  for (size_t i = 0; i < pending.indices.size(); ++i) {
    const auto place = static_cast<int64_t>(i);
    if (std::ranges::binary_search(pending.faults, place, {}, &PendingBatch::Fault::place))
      continue;
    good.push_back(place);
    batch.indices.push_back(pending.indices[i]);
    batch.randoms.emplace_back(pending.seed ^ kOtherThanTransforms, pending.epoch,
                               pending.random_keys[i]);
  }
  if (!pending.faults.empty()) {
    const at::Tensor places = at::tensor(good, at::kLong);
    change_each(batch, [&](const at::Tensor& all) { return all.index_select(0, places); });
  }
  return batch;
}

}  // namespace

int automatic_workers() {
  constexpr int kMaxRanks = 1 << 16;
  const auto ranks = base::env_int("LOCAL_WORLD_SIZE", 1, kMaxRanks).value_or(1);
  return std::max(base::cpus_of_rank(static_cast<int>(ranks)) - 1, 1);
}

int64_t max_skipped(const LoaderOptions& options, int64_t samples) {
  constexpr int64_t kFew = 5;
  if (options.error_budget == 0) return 0;
  constexpr double kRounding = 1e-6;  // 0.29 * 100 is less than 29
  const auto share =
      static_cast<int64_t>(options.error_budget * static_cast<double>(samples) + kRounding);
  return std::min(std::max(share, std::min(kFew, samples / 2)), std::max<int64_t>(samples - 1, 0));
}

void refuse_empty_epoch(const LoaderOptions& options, int64_t samples) {
  if (samples == 1) {
    throw base::UserError(fmt::format(
        "the only {} could not be read; mend or replace the file that the warning names",
        options.sample_name));
  }
  throw base::UserError(
      fmt::format("none of {} could be read; mend or replace the files that the warnings name",
                  base::counted(samples, options.sample_name)));
}

void check_skipped(const LoaderOptions& options, int64_t skipped, int64_t samples) {
  const int64_t most = max_skipped(options, samples);
  if (skipped <= most) return;
  if (skipped == samples) refuse_empty_epoch(options, samples);
  throw base::UserError(fmt::format(
      "{} of {} could not be read, more than the {} that {} ({:.3g} %) allows; mend or remove "
      "the files that the warnings name, or raise {}",
      skipped, base::counted(samples, options.sample_name), most, options.budget_name,
      100 * options.error_budget, options.budget_name));
}

Loader::Loader(const std::shared_ptr<const Dataset>& dataset, const LoaderOptions& options)
    : Loader(dataset, sampler_of(*dataset, options), without_shuffle(options)) {}

Loader::Loader(std::shared_ptr<const Dataset> dataset, std::shared_ptr<Sampler> sampler,
               const LoaderOptions& options)
    : dataset_(std::move(dataset)),
      sampler_(std::move(sampler)),
      options_(options),
      batch_size_(choose_batch_size(options, sampler_->num_replicas())),
      pins_memory_(pins_memory(options)),
      maker_(std::make_shared<const detail::BatchMaker>(dataset_)) {
  check_ranges(options);
  if (options.shuffle) {
    throw base::UserError(
        "a loader was given a sampler together with shuffle; the sampler has the order, so shuffle "
        "is its option");
  }
  int workers = options.num_workers;
  // Other data sets only copy from memory, which threads would not speed up.
  if (workers == kAutoWorkers) workers = maker_->samples() != nullptr ? automatic_workers() : 0;
  if (workers > 0) pool_ = std::make_unique<detail::WorkerPool>(maker_, workers);
}

Loader::~Loader() = default;
Loader::Loader(Loader&&) noexcept = default;
Loader& Loader::operator=(Loader&&) noexcept = default;

int64_t Loader::num_samples() const {
  const int64_t all = sampler_->size();
  return options_.drop_last ? all - all % batch_size_ : all;
}

int64_t Loader::num_batches() const {
  return (num_samples() + batch_size_ - 1) / batch_size_;
}

int64_t Loader::batches_left() const {
  return (std::ssize(order_) - position_ + batch_size_ - 1) / batch_size_;
}

void Loader::start_epoch(int64_t epoch) {
  move_to({.epoch = epoch});
}

void Loader::move_to(const SamplerState& state) {
  const int64_t ranks = sampler_->num_replicas();
  const auto share = sampler_->share();
  // With padding, another number of ranks may have consumed more samples than there are.
  const int64_t all = std::min(share ? share->list_size : INT64_MAX, num_samples() * ranks);
  const int64_t consumed = std::min(state.consumed, all);
  int64_t left = share ? (all - consumed + ranks - 1) / ranks : num_samples() - consumed / ranks;
  if (options_.drop_last) left -= left % batch_size_;
  // If the consumed samples are not a multiple of the ranks, the first ranks have consumed one
  // more.
  const bool is_ahead = share && share->rank < consumed % ranks;
  const int64_t position = consumed / ranks + (is_ahead ? 1 : 0);
  if (pool_) pool_->clear();
  pending_.clear();
  sampler_->set_epoch(state.epoch);
  order_ = sampler_->indices();
  storage_order_ = sampler_->storage_order(order_);
  // Pads from the front, like the sampler.
  if (position + left > std::ssize(order_)) order_.push_back(order_.front());
  order_.resize(static_cast<size_t>(position + left));
  position_ = scheduled_ = requested_ = position;
  consumed_ahead_ = state.consumed - position * ranks;
  skipped_ = 0;
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
      pending->read_ahead = next_read_ahead();
      pending->slot = free_slot();
      if (end - scheduled_ < batch_size_) {
        change_each(pending->slot,
                    [&](const at::Tensor& all) { return all.narrow(0, 0, end - scheduled_); });
      }
    }
    scheduled_ = end;
    pending_.push_back(pending);
    if (pool_) pool_->add(std::move(pending));
  }
}

std::vector<int64_t> Loader::next_read_ahead() {
  // Several batches, because large reads are faster; not all, which would delay the first.
  constexpr int64_t kBatchesAtOnce = 4;
  const int64_t all = std::ssize(storage_order_);
  const int64_t end = std::min(requested_ + kBatchesAtOnce * batch_size_, all);
  const bool is_far_enough = requested_ > scheduled_ + batch_size_ + sampler_->read_ahead();
  if (end <= requested_ || is_far_enough) return {};
  const auto begin = storage_order_.begin();
  std::vector<int64_t> ahead(begin + requested_, begin + end);
  requested_ = end;
  return ahead;
}

/// Memory for a batch: a released batch's, if there is one.
Batch Loader::free_slot() {
  // torch reuses pinned memory itself: only it knows when the GPU has finished reading.
  if (pins_memory_) return maker_->samples()->allocate(batch_size_, /*pin_memory=*/true);
  for (const Batch& slot : slots_) {
    if (is_free(slot.data) && is_free(slot.target)) return slot;
  }
  slots_.push_back(maker_->samples()->allocate(batch_size_));
  return slots_.back();
}

std::optional<Batch> Loader::next() {
  const auto begin = std::chrono::steady_clock::now();
  schedule(pool_ ? options_.prefetch : 1);
  if (pending_.empty()) return std::nullopt;
  complete(*pending_.front());
  const std::shared_ptr<PendingBatch> pending = std::move(pending_.front());
  pending_.pop_front();
  position_ += std::ssize(pending->indices);
  if (pool_) schedule(options_.prefetch);
  Batch batch = result_of(*pending);
  if (pins_memory_ && !batch.data.is_pinned()) {
    change_each(batch, [](const at::Tensor& tensor) { return tensor.pin_memory(); });
  }
  wait_seconds_ = base::seconds_since(begin);
  return batch;
}

/// Makes the batch, or waits for the workers that do.
void Loader::complete(PendingBatch& pending) {
  if (!pool_) {
    for (int64_t job = 0; job < pending.jobs; ++job) {
      if (auto error = maker_->run(pending, job)) pending.faults.push_back({job, std::move(error)});
    }
    return;
  }
  if (pool_->wait(pending, options_.timeout)) return;
  throw base::UnavailableError(fmt::format(
      "no batch for {}: {} is not ready; a disk or file server hangs, or the timeout is too short",
      base::format_seconds(options_.timeout), maker_->describe(pool_->unfinished(pending))));
}

Batch Loader::result_of(PendingBatch& pending) {
  // The order must not depend on the threads.
  std::ranges::sort(pending.faults, {}, &PendingBatch::Fault::place);
  for (const auto& [place, error] : pending.faults) {
    std::string text;
    bool is_new = true;
    try {
      std::rethrow_exception(error);
    } catch (const base::UserError& fault) {
      if (maker_->samples() == nullptr) throw;
      const int64_t index = pending.indices[static_cast<size_t>(place)];
      text = fmt::format("{}: {}", maker_->describe(index, fault.what()), fault.what());
      is_new = damaged_.emplace(index, text).second;
    }
    if (options_.on_error == LoaderOptions::OnError::kRaise) {
      throw base::UserError(fmt::format("{} ({})", text, options_.on_error_advice));
    }
    const bool collects = options_.on_error == LoaderOptions::OnError::kCollect;
    if (is_new)
      spdlog::log(collects ? spdlog::level::debug : spdlog::level::warn, "cannot be used: {}",
                  text);
    if (collects) continue;
    // A sampler may round the number of samples to a multiple of the ranks.
    const int64_t replicas = sampler_->num_replicas();
    const int64_t drawn = std::ssize(order_) * replicas;
    const auto all = static_cast<int64_t>(maker_->samples()->size());
    check_skipped(options_, ++skipped_, std::abs(drawn - all) < replicas ? all : drawn);
    const bool is_empty = std::ssize(pending.faults) == std::ssize(pending.indices);
    if (is_empty && !options_.empty_batches) {
      throw base::UserError("no sample of a batch could be read; one is " + text);
    }
  }
  const Batch made = good_samples(pending);
  return maker_->samples() != nullptr ? maker_->samples()->trimmed(made) : made;
}

SamplerState Loader::state() const {
  return {.seed = sampler_->seed(),
          .epoch = sampler_->epoch(),
          .consumed = position_ * sampler_->num_replicas() + consumed_ahead_,
          .fingerprint = std::bit_cast<int64_t>(dataset_->fingerprint()),
          .order = sampler_->order_name()};
}

void Loader::resume(const SamplerState& state) {
  check_resumable(state, *dataset_, *sampler_);
  move_to(state);
}

}  // namespace syncbn::data
