#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <syncbn/data/dataset.h>
#include <syncbn/data/sampler.h>

namespace syncbn::data {

struct LoaderOptions {
  int64_t batch_size = 1;  ///< of this rank
  bool drop_last = false;  ///< leave out a last batch that is smaller
};

/// Batches of this rank's samples, in the sampler's order.
///
///     Loader loader(dataset, sampler, {.batch_size = 8});
///     for (int64_t epoch = 0; epoch < epochs; ++epoch) {
///       loader.start_epoch(epoch);
///       while (auto batch = loader.next()) train(*batch);
///     }
///
/// An epoch may be left early: the next start_epoch() begins anew. Not thread-safe.
class Loader {
 public:
  /// @throws base::UserError when batch_size is below 1.
  Loader(std::shared_ptr<const Dataset> dataset, std::shared_ptr<Sampler> sampler,
         const LoaderOptions& options);

  /// Batches of one epoch; the same in every epoch and, but for SequentialShardSampler, on every
  /// rank.
  int64_t num_batches() const;

  /// Goes to the beginning of an epoch; calls the sampler's set_epoch.
  void start_epoch(int64_t epoch);

  /// The next batch, or nothing at the end of the epoch and before the first start_epoch().
  std::optional<Batch> next();

  /// Where the batches given so far end; next() after resume() of it is the batch that would have
  /// come next.
  SamplerState state() const;

  /// Goes to that place, in the middle of an epoch too, on any number of ranks.
  /// @throws base::UserError for a state of another version, seed or data set, or at a place that
  ///   this number of ranks does not reach (consumed samples not a multiple of it).
  void resume(const SamplerState& state);

  const Dataset& dataset() const { return *dataset_; }

 private:
  /// Samples of an epoch that are given out: all, or whole batches' with drop_last.
  int64_t usable() const;

  std::shared_ptr<const Dataset> dataset_;
  std::shared_ptr<Sampler> sampler_;
  LoaderOptions options_;
  std::vector<int64_t> order_;
  int64_t position_ = 0;
};

}  // namespace syncbn::data
