#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <syncbn/data/dataset.h>
#include <syncbn/data/sampler.h>

namespace syncbn::data {

namespace detail {
struct PendingBatch;
class BatchMaker;
class WorkerPool;
}  // namespace detail

/// For LoaderOptions::num_workers: automatic_workers() for a SampleDataset, otherwise 0.
constexpr int kAutoWorkers = -1;

/// base::cpus_of_rank(LOCAL_WORLD_SIZE) less one for the training thread; at least 1.
int automatic_workers();

struct LoaderOptions {
  /// Samples per batch of this rank; 1 if neither this nor global_batch_size is given.
  std::optional<int64_t> batch_size = {};
  bool drop_last = false;  ///< leave out a smaller last batch
  /// Samples per batch over all ranks, instead of batch_size.
  std::optional<int64_t> global_batch_size = {};
  /// Threads that make samples; 0: next() makes them itself. The bytes of a batch do not depend on
  /// the number of threads.
  int num_workers = 0;
  /// Maximum number of batches made in advance.
  int64_t prefetch = 2;
  /// Put batches into page-locked memory, from which GPUs copy faster. Ignored without a GPU, with
  /// one warning per process.
  bool pin_memory = false;
  /// How long next() waits for a batch from worker threads; 0: no limit. After any such timeout,
  /// the destructor detaches the threads instead of joining them, because one may hang forever.
  std::chrono::milliseconds timeout{0};
  /// What next() does if a sample throws a base::UserError: throw it, or leave the sample out of
  /// its batch. A batch must keep at least one sample, unless `empty_batches` are allowed.
  /// kCollect leaves out any number, and warns of none: damaged() has them.
  enum class OnError { kRaise, kSkip, kCollect } on_error = OnError::kRaise;
  bool empty_batches = false;
  /// With kSkip: the share of an epoch's samples, over all ranks, that may be left out before
  /// next() throws. max_skipped() is their number.
  double error_budget = 0.05;
  /// For messages about samples that cannot be made; lib/train sets them to its keys and splits.
  std::string on_error_advice = "on_error = kSkip leaves such samples out";
  std::string budget_name = "error_budget";
  std::string sample_name = "sample";
  /// Without a sampler: whether each epoch has a new order, a function of `seed` and the epoch.
  std::optional<bool> shuffle = {};
  int64_t seed = 0;
};

/// How many of an epoch's samples may be left out (OnError::kSkip): the share error_budget, but not
/// all. Unless it is 0, at least 5 or half of the samples, whichever is less: one sample of a small
/// set may already exceed the share.
int64_t max_skipped(const LoaderOptions& options, int64_t samples);

/// @param samples that were left out: all of an epoch, or of the part that was trained on
/// @throws base::UserError
[[noreturn]] void refuse_empty_epoch(const LoaderOptions& options, int64_t samples);

/// Checks the number of samples that were left out. A loader checks only its own rank's; call this
/// with the sum over all ranks where that is known.
/// @param samples of an epoch, over all ranks
/// @throws base::UserError if `skipped` is above max_skipped()
void check_skipped(const LoaderOptions& options, int64_t skipped, int64_t samples);

/// Batches of this rank's samples, in the sampler's order.
///
///     Loader loader(dataset, sampler, {.batch_size = 8, .num_workers = kAutoWorkers});
///     for (int64_t epoch = 0; epoch < epochs; ++epoch) {
///       loader.start_epoch(epoch);
///       while (auto batch = loader.next()) train(*batch);
///     }
///
/// start_epoch() may be called before the previous epoch has ended. The worker threads live as long
/// as the loader, which reuses the memory of a batch once its tensors are released. Not
/// thread-safe.
class Loader {
 public:
  /// @throws base::UserError if batch_size is below 1, if both batch_size and global_batch_size are
  ///   given, if global_batch_size is not a multiple of the number of ranks, or if `shuffle` is
  ///   given: it is an option of the sampler.
  Loader(std::shared_ptr<const Dataset> dataset, std::shared_ptr<Sampler> sampler,
         const LoaderOptions& options);
  /// All samples on one rank, without a sampler.
  Loader(const std::shared_ptr<const Dataset>& dataset, const LoaderOptions& options);
  ~Loader();
  Loader(Loader&&) noexcept;
  Loader& operator=(Loader&&) noexcept;

  /// Batches per epoch: the same in every epoch and, except with SequentialShardSampler, on every
  /// rank.
  int64_t num_batches() const;

  /// This rank's samples per epoch, without those that drop_last leaves out.
  int64_t num_samples() const;

  /// Batches that next() has yet to return in this epoch.
  int64_t batches_left() const;

  /// Moves to the beginning of an epoch, and calls the sampler's set_epoch().
  void start_epoch(int64_t epoch);

  /// The next batch, or nothing at the end of the epoch and before the first start_epoch().
  /// @throws base::UserError naming a sample that cannot be made, and its file; any other exception
  ///   of the data set; base::UnavailableError after `timeout`. next() may be called again: after
  ///   an error it returns the following batch, after a timeout the same one.
  std::optional<Batch> next();

  /// Seconds that the last next() took, that is, how long the training step waited for data.
  double wait_seconds() const { return wait_seconds_; }
  /// Samples left out so far in this epoch (OnError::kSkip).
  int64_t skipped() const { return skipped_; }

  /// Samples that cannot be made, with the fault. next() does not warn about these again.
  const std::map<int64_t, std::string>& damaged() const { return damaged_; }
  void set_damaged(std::map<int64_t, std::string> samples) { damaged_ = std::move(samples); }

  /// The position after the last batch that next() returned.
  SamplerState state() const;

  /// Moves to a position, which may be in the middle of an epoch and from a run with another number
  /// of ranks. Does not read earlier samples.
  /// @throws base::UserError for a state of another version, seed or data set; in the middle of an
  ///   epoch also for another order (Sampler::order_name()), and, with a sampler without share(),
  ///   if the consumed samples are not a multiple of the number of ranks.
  void resume(const SamplerState& state);

  const Dataset& dataset() const { return *dataset_; }

 private:
  void move_to(const SamplerState& state);
  /// Starts batches until `batches` are pending.
  void schedule(int64_t batches);
  /// The next samples to prefetch.
  std::vector<int64_t> next_read_ahead();
  Batch free_slot();
  void complete(detail::PendingBatch& pending);
  Batch result_of(detail::PendingBatch& pending);

  std::shared_ptr<const Dataset> dataset_;
  std::shared_ptr<Sampler> sampler_;
  LoaderOptions options_;
  int64_t batch_size_;
  bool pins_memory_;
  std::vector<int64_t> order_;
  int64_t position_ = 0;   ///< samples returned by next()
  int64_t scheduled_ = 0;  ///< samples returned or pending
  /// In a resumed epoch: the samples that all ranks consumed beyond `position_` each.
  int64_t consumed_ahead_ = 0;
  std::vector<int64_t> storage_order_;
  int64_t requested_ = 0;  ///< samples of storage_order_ that were prefetched
  int64_t skipped_ = 0;
  std::map<int64_t, std::string> damaged_;
  double wait_seconds_ = 0;
  std::vector<Batch> slots_;
  std::deque<std::shared_ptr<detail::PendingBatch>> pending_;
  std::shared_ptr<const detail::BatchMaker> maker_;
  std::unique_ptr<detail::WorkerPool> pool_;
};

}  // namespace syncbn::data
