#pragma once

#include <cstdint>
#include <string>

#include <syncbn/models/model.h>
#include <syncbn/train/config.h>
#include <syncbn/train/inputs.h>

namespace syncbn::train {

/// Multiply-adds of convolutions and matrix products in `model`'s forward pass on `input`. The
/// model is put into evaluation mode.
int64_t multiply_adds(models::Model& model, const at::Tensor& input);

/// `train --dry_run`: takes a few steps on every rank, and logs what a run would cost: parameters,
/// multiply-adds, time of a step, memory, duration. Writes nothing.
/// @return the exit code 0
int dry_run(const Config& config, const std::string& name, const Inputs& inputs);

}  // namespace syncbn::train
