#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <syncbn/models/model.h>
#include <syncbn/train/config.h>
#include <syncbn/train/inputs.h>

namespace syncbn::train {

/// Logs the remarks of data sets as warnings, each once.
/// @return whether one of them is a fault
bool warn_of_remarks(const std::vector<std::shared_ptr<const data::Dataset>>& sets);

/// Logs what a run is about to do: data, ranks, batch, classes. Warns of what looks like a mistake.
void report_start(const Config& config, const std::string& name, const Inputs& inputs,
                  const models::Model& model, int64_t seed);

}  // namespace syncbn::train
