#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include <syncbn/data/dataset.h>
#include <syncbn/data/sampler.h>
#include <syncbn/train/config.h>

namespace syncbn::train {

/// The data of a run. Each rank loads it by itself, before the process group is formed: a rank that
/// finds a mistake in the data can exit while no other rank waits for it.
struct Inputs {
  std::shared_ptr<const data::Dataset> train_set;
  /// The validation split, or the test split if there is none.
  std::shared_ptr<const data::Dataset> eval_set;
  data::Split eval_split = data::Split::kTest;  ///< kVal or kTest
  bool has_test_set = true;
  /// Makes a sampler of the training set for this rank.
  std::function<std::shared_ptr<data::Sampler>(int64_t seed)> make_sampler;
  int64_t batch_size = 1;  ///< of each rank
};

/// Samples of each rank's batch.
/// @throws base::UserError when the ranks cannot share the batch or the statistics evenly, or a
///   rank cannot divide its batch into `accumulate` parts
int64_t divided_batch(const Config& config, int world_size);

/// @throws base::UserError when data is missing or damaged, or cannot be divided between the ranks.
Inputs load_inputs(const Config& config, int rank, int world_size);

/// The data of `train eval`: `split` alone, as training and as evaluation set.
/// @throws base::UserError when the data has no such split
Inputs load_split(const Config& config, data::Split split, int world_size);

}  // namespace syncbn::train
