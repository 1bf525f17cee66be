#pragma once

#include <cstdint>
#include <string>

#include <syncbn/models/model.h>
#include <syncbn/train/config.h>
#include <syncbn/train/inputs.h>

namespace syncbn::train {

/// Logs what a run is about to do: data, ranks, batch, classes. Warns of what looks like a mistake.
void report_start(const Config& config, const std::string& name, const Inputs& inputs,
                  const models::Model& model, int64_t seed);

}  // namespace syncbn::train
