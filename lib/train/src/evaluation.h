#pragma once

#include <memory>

#include <syncbn/data/dataset.h>
#include <syncbn/data/loader.h>
#include <syncbn/models/model.h>

#include "metrics.h"
#include "model.h"

namespace syncbn::train {

/// Evaluates each sample of a data set once, divided between the ranks, with rank 0's running
/// statistics. Every rank calls it and gets the sums of all. Leaves the model in evaluation mode.
/// @param options drop_last and on_error are ignored, since no sample may be left out.
SampleSums evaluate(models::Model& model, const std::shared_ptr<const data::Dataset>& dataset,
                    data::LoaderOptions options, const BatchToDevice& to_device);

}  // namespace syncbn::train
