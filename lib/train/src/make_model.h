#pragma once

#include <memory>

// at::MemoryFormat: how images lie in memory.
#include <c10/core/MemoryFormat.h>

#include <syncbn/data/dataset.h>
#include <syncbn/models/model.h>
#include <syncbn/train/config.h>

namespace syncbn::train {

/// How a model and its input lie in memory, as the configuration says.
at::MemoryFormat memory_format(const Config& config, const models::Model& model);

/// The configuration's model, with the same parameters on all ranks, where the default process
/// group is and laid out by memory_format(). Afterwards each rank draws random numbers of its own.
/// @throws base::UserError on rank 0, LeaveSilently on the others, when the data set's samples or
///   this machine's memory do not suit the model.
std::shared_ptr<models::Model> make_model(const Config& config, const data::Dataset& dataset);

}  // namespace syncbn::train
