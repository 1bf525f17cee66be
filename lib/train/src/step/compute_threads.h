#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <syncbn/data/dataset.h>
#include <syncbn/models/model.h>
#include <syncbn/train/config.h>

namespace syncbn::train {

/// The multiply-adds of a forward pass of one sample, in convolutions and matrix products. Leaves
/// the model in evaluation mode.
/// @param sample_shape {channels, height, width}
int64_t multiply_adds(models::Model& model, std::vector<int64_t> sample_shape);

/// Threads that wait for others take the processor from other programs: by default, libgomp's spin
/// for milliseconds before they sleep. If this process has several threads and the environment does
/// not set the time, starts the program anew with 0.1 ms.
/// @param args of the program
void spare_waiting_threads(const Config& config, const std::vector<std::string>& args);

/// If `threads` is 0: uses a single thread for a network and batch so small that several would be
/// slower. Depends on nothing but these, so runs can be repeated.
void choose_threads(const Config& config, models::Model& model, const data::Dataset& dataset,
                    int64_t batch_size);

}  // namespace syncbn::train
