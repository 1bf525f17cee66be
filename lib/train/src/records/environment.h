#pragma once

#include <string>

#include <syncbn/train/inputs.h>

namespace syncbn::train {

/// The text of environment.json: what a run is made of besides its configuration. Every rank calls
/// it, once, and returns the same.
std::string describe_environment(const Inputs& inputs);

}  // namespace syncbn::train
