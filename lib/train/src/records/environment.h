#pragma once

#include <string>

#include <syncbn/train/inputs.h>

namespace syncbn::train {

/// The text of environment.json: what a run depends on besides its configuration. Every rank calls
/// it, once; the result is the same on all.
std::string describe_environment(const Inputs& inputs);

}  // namespace syncbn::train
