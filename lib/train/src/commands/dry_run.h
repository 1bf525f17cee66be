#pragma once

#include <cstdint>
#include <string>

#include <syncbn/train/config.h>
#include <syncbn/train/inputs.h>

namespace syncbn::train {

/// `train --dry_run`: takes a few steps on every rank, and logs what a run would cost: parameters,
/// multiply-adds, time of a step, memory, duration. Writes nothing.
/// @return the exit code 0
int dry_run(const Config& config, const std::string& name, const Inputs& inputs);

}  // namespace syncbn::train
