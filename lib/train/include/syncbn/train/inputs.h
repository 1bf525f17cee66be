#pragma once

#include <cstdint>
#include <memory>

#include <syncbn/data/dataset.h>
#include <syncbn/data/sampler.h>
#include <syncbn/train/config.h>

namespace syncbn::train {

/// The data of a run. Every rank makes it alone, before the process group is formed: a rank that
/// finds a mistake in the data can exit while no other rank waits for it.
struct Inputs {
  std::shared_ptr<const data::Dataset> train_set;
  std::shared_ptr<const data::Dataset> test_set;
  std::shared_ptr<data::Sampler> sampler;
  int64_t batch_size = 1;  ///< of each rank
};

/// @throws base::UserError when data is missing or damaged, or cannot be divided between the ranks.
Inputs load_inputs(const Config& config, int rank, int world_size);

}  // namespace syncbn::train
