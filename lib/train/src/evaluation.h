#pragma once

#include <memory>

#include <syncbn/data/dataset.h>
#include <syncbn/data/loader.h>
#include <syncbn/models/model.h>

#include "batch_to_device.h"
#include "sample_sums.h"

namespace syncbn::train {

/// Loss and hits over a data set: each sample once over all ranks, by rank 0's running statistics.
/// Every rank calls it. Leaves the model in evaluation mode.
/// @param options of loading; those that would leave samples out are not followed.
SampleSums evaluate(models::Model& model, const std::shared_ptr<const data::Dataset>& dataset,
                    data::LoaderOptions options, const BatchToDevice& to_device);

}  // namespace syncbn::train
