#pragma once

#include <cstdint>
#include <memory>

#include <syncbn/data/dataset.h>
#include <syncbn/data/sampler.h>
#include <syncbn/train/config.h>

namespace syncbn::train {

/// What a run works on; made by every rank alone, before any process group exists, so that faults
/// of the data are found while there is nobody to wait for.
struct Inputs {
  std::shared_ptr<const data::Dataset> train_set;
  std::shared_ptr<const data::Dataset> test_set;
  std::shared_ptr<data::Sampler> sampler;
  int64_t batch_size = 1;  ///< of this rank
};

/// @throws base::UserError when data is missing or damaged, or cannot be dealt to so many ranks.
Inputs load_inputs(const Config& config, int rank, int world_size);

}  // namespace syncbn::train
