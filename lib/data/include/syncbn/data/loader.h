#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include <syncbn/data/dataset.h>
#include <syncbn/data/sampler.h>

namespace syncbn::data {

namespace detail {
struct PendingBatch;
class BatchMaker;
class WorkerPool;
}  // namespace detail

/// LoaderOptions::num_workers: of a SampleDataset automatic_workers(), of others none.
constexpr int kAutoWorkers = -1;

/// Threads that one rank of a host should decode with: base::cpus_of_rank(LOCAL_WORLD_SIZE) less
/// one for the thread that trains; at least 1.
int automatic_workers();

struct LoaderOptions {
  /// Of this rank; 1 when neither this nor global_batch_size is given.
  std::optional<int64_t> batch_size = {};
  bool drop_last = false;  ///< leave out a last batch that is smaller
  /// Of all ranks together; instead of batch_size.
  std::optional<int64_t> global_batch_size = {};
  /// Threads that make samples; 0: the thread that calls next() makes them. Batches are the same
  /// bytes for any number.
  int num_workers = 0;
  /// Batches that are made ahead, at most.
  int64_t prefetch = 2;
  /// Batches in memory that a GPU copies from directly. Without a GPU it changes nothing, which is
  /// said once in a process.
  bool pin_memory = false;
  /// How long next() waits for a batch of its workers; 0: as long as it takes. A worker that hangs
  /// does not keep the loader from being destroyed: its thread is left behind.
  std::chrono::milliseconds timeout{0};
  /// What a sample's base::UserError does: end next() with it, or leave the sample out of its
  /// batch, of which at least one has to be left.
  enum class OnError { kRaise, kSkip } on_error = OnError::kRaise;
  /// With kSkip: the share of an epoch's samples that may be left out before next() throws.
  double error_budget = 0.05;
  /// Without a sampler: a new order in each epoch, a function of `seed` and the epoch.
  std::optional<bool> shuffle = {};
  int64_t seed = 0;
};

/// Batches of this rank's samples, in the sampler's order.
///
///     Loader loader(dataset, sampler, {.batch_size = 8, .num_workers = kAutoWorkers});
///     for (int64_t epoch = 0; epoch < epochs; ++epoch) {
///       loader.start_epoch(epoch);
///       while (auto batch = loader.next()) train(*batch);
///     }
///
/// An epoch may be left early: the next start_epoch() begins anew. Its threads live as long as the
/// loader. A batch's memory is used again once nobody holds its tensors. Not thread-safe.
class Loader {
 public:
  /// @throws base::UserError when batch_size is below 1, when both batch_size and global_batch_size
  ///   are given, when the latter is not a multiple of the number of ranks, or when `shuffle` is
  ///   given although there is a sampler, which has the order.
  Loader(std::shared_ptr<const Dataset> dataset, std::shared_ptr<Sampler> sampler,
         const LoaderOptions& options);
  /// All samples on one rank, shuffled if options.shuffle says so.
  Loader(const std::shared_ptr<const Dataset>& dataset, const LoaderOptions& options);
  ~Loader();
  Loader(Loader&&) noexcept;
  Loader& operator=(Loader&&) noexcept;

  /// Batches of one epoch; the same in every epoch and, but for SequentialShardSampler, on every
  /// rank.
  int64_t num_batches() const;

  /// Goes to the beginning of an epoch; calls the sampler's set_epoch.
  void start_epoch(int64_t epoch);

  /// The next batch, or nothing at the end of the epoch and before the first start_epoch().
  /// @throws base::UserError naming the sample and its file when it cannot be made; what else the
  ///   data set throws; base::UnavailableError after `timeout`. next() may be called again: after
  ///   an error of the data set it gives the batch behind, after a timeout the same one.
  std::optional<Batch> next();

  /// Seconds that the last next() took: what the training step waited for data.
  double wait_seconds() const { return wait_seconds_; }
  /// Samples that were left out in this epoch so far (OnError::kSkip).
  int64_t skipped() const { return skipped_; }

  /// Where the batches given so far end; next() after resume() of it is the batch that would have
  /// come next.
  SamplerState state() const;

  /// Goes to that place, in the middle of an epoch too, on any number of ranks. No sample before it
  /// is read.
  /// @throws base::UserError for a state of another version, seed or data set, in the middle of an
  ///   epoch for one in another order (Sampler::order_name()), or at a place that this number of
  ///   ranks does not reach (consumed samples not a multiple of it).
  void resume(const SamplerState& state);

  const Dataset& dataset() const { return *dataset_; }

 private:
  /// Samples of an epoch that are given out: all, or whole batches' with drop_last.
  int64_t usable() const;
  void go_to(int64_t epoch, int64_t position);
  /// Has up to `batches` batches on their way.
  void schedule(int64_t batches);
  /// What storage is asked for while the next batch is made.
  std::vector<int64_t> take_ahead();
  Batch free_slot();
  void finish(detail::PendingBatch& pending);
  Batch take(detail::PendingBatch& pending);
  Batch pinned(Batch batch) const;
  Batch without_faults(detail::PendingBatch& pending);

  std::shared_ptr<const Dataset> dataset_;
  std::shared_ptr<Sampler> sampler_;
  LoaderOptions options_;
  int64_t batch_size_;
  bool pins_;
  std::vector<int64_t> order_;
  int64_t position_ = 0;   ///< samples that were given
  int64_t scheduled_ = 0;  ///< samples that are on their way or were given
  std::vector<int64_t> storage_order_;
  int64_t asked_for_ = 0;  ///< samples of storage_order_
  int64_t skipped_ = 0;
  double wait_seconds_ = 0;
  std::vector<Batch> slots_;
  std::deque<std::shared_ptr<detail::PendingBatch>> pending_;
  std::shared_ptr<const detail::BatchMaker> maker_;
  std::unique_ptr<detail::WorkerPool> pool_;
};

}  // namespace syncbn::data
